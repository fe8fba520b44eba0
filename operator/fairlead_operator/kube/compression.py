"""Compresses objects as JSON with deflate. The dictionary is another object of the same kind and component, with much text in common."""

import zlib
from dataclasses import dataclass

import msgspec

from fairlead_operator import names
from fairlead_operator.objects import Body, component_of

WINDOW = 32768  # bytes of a dictionary that deflate can refer back to
DICTIONARY_GROWTH = 1.25  # a new dictionary is this many times larger than the last, so few are ever taken
RAW_DEFLATE = -15  # deflate without zlib's header and checksum
_COMPONENTS = {names.WORKER, names.FOLLOWER, names.ROUTER, names.BATCH, names.CANARY}


@dataclass(frozen=True, slots=True)
class CompressedObject:
    """One version of one object."""

    uid: str
    version: int
    data: bytes
    dictionary: bytes  # shared by all objects that were compressed with it

    def decompress(self) -> Body:
        body: Body = msgspec.json.decode(zlib.decompressobj(RAW_DEFLATE, self.dictionary).decompress(self.data))
        return body


class Compressor:
    """Compresses each object with the largest object of its kind so far as dictionary. Each compressed object keeps its dictionary."""

    def __init__(self) -> None:
        self._dictionaries: dict[tuple[str, str], bytes] = {}

    def compress(self, body: Body, version: int) -> CompressedObject:
        text = msgspec.json.encode(body)
        component = component_of(body)
        dictionary_key = body["kind"], component if component in _COMPONENTS else ""
        dictionary = self._dictionaries.get(dictionary_key, b"")
        if len(text) > DICTIONARY_GROWTH * len(dictionary) and len(dictionary) < WINDOW:
            dictionary = self._dictionaries[dictionary_key] = text[:WINDOW]
        compressor = zlib.compressobj(1, wbits=RAW_DEFLATE, zdict=dictionary)
        data = compressor.compress(text) + compressor.flush()
        return CompressedObject(body["metadata"]["uid"], version, data, dictionary)
