"""Objects as bytes: JSON, compressed against another object of the same kind and component, which differs in names and little else."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from fairlead_operator import names
from fairlead_operator.objects import component_of

Body = Mapping[str, Any]
WINDOW = 32768  # bytes of a dictionary that deflate looks back on
GROWN = 1.25  # times larger than the one before: few are ever taken, and the last one knows everything that such objects say
RAW = -15  # deflate alone, without zlib's header and checksum
_COMPONENTS = {names.WORKER, names.FOLLOWER, names.ROUTER, names.CANARY}


@dataclass(frozen=True, slots=True)
class Held:
    """One version of one object."""

    uid: str
    version: int
    packed: bytes
    like: bytes  # the dictionary; shared by all of its kind

    def read(self) -> Body:
        body: Body = msgspec.json.decode(zlib.decompressobj(RAW, self.like).decompress(self.packed))
        return body


class Packing:
    """The largest object so far of each kind is what others are packed against; those packed before keep what they were packed by."""

    def __init__(self) -> None:
        self._like: dict[tuple[str, str], bytes] = {}

    def pack(self, body: Body, version: int) -> Held:
        text = msgspec.json.encode(body)
        component = component_of(body)
        of = body["kind"], component if component in _COMPONENTS else ""
        like = self._like.get(of, b"")
        if len(text) > GROWN * len(like) and len(like) < WINDOW:
            like = self._like[of] = text[:WINDOW]
        pressed = zlib.compressobj(1, wbits=RAW, zdict=like)
        packed = pressed.compress(text) + pressed.flush()
        return Held(body["metadata"]["uid"], version, packed, like)
