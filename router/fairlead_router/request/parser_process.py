"""The process that reads large bodies: `python -m fairlead_router.request.parser_process FD CACHE_BYTES`.

Decoding holds Python's lock, so only another process keeps the router's event loop free. A body that takes too much CPU or memory ends this
process by its own limits, and `parser_pool` starts another. It answers the messages of one connection, and exits when that is closed. With
each answer it tells the CPU seconds that bodies have taken since its start: tenants pay for them.
"""

import contextlib
import math
import os
import resource
import sys
import time
from collections import OrderedDict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec

from fairlead_common.json_size import JsonTooLarge, check_json
from fairlead_common.memory import trim_heap
from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_router.errors import ApiError
from fairlead_router.request import validation
from fairlead_router.request.body import Body, Encoding, RequestParams, encode, read_fields

CPU_SECONDS: Final = 10
"""CPU time of one body. The longest prompt of a million tokens takes 3 s."""
MEMORY_BYTES: Final = 96 << 20
"""Memory of one body, beside TOKEN_BYTES for each token of the longest prompt."""
TOKEN_BYTES: Final = 200
MAX_FORMATS: Final = 4
"""Prompt formats that are kept. The sender counts with the same number."""
NICENESS: Final = 10
"""Priority below the event loop, which all requests wait for."""


class Load(msgspec.Struct, tag=True):
    """A prompt format, sent before its first use. It has no answer."""

    name: str
    format: PromptFormat


class Read(msgspec.Struct, tag=True):
    """Answered with `RequestParams` or a `Refusal`. The body follows as a message of its own."""

    path: str
    session: str
    has_canaries: bool
    max_tokens: int


class Validate(msgspec.Struct, tag=True):
    """Answered with `Valid` or a `Refusal`. The body follows as a message of its own."""

    path: str
    max_tokens: int


class Encode(msgspec.Struct, tag=True):
    """Encode the prompt of the latest body. Answered with `Tokens`."""

    name: str
    encoding: Encoding


class Finish(msgspec.Struct, tag=True):
    """Forget the body, and return its memory to the system. Answered with `Valid`: the tenant pays for this too."""


class Valid(msgspec.Struct, tag=True):
    pass


class Refusal(msgspec.Struct, tag=True):
    """Fields of an ApiError."""

    status: int
    message: str
    param: str | None
    code: str | None


class Tokens(msgspec.Struct, tag=True):
    """`Encoded` in bytes, and what the token cache found and missed."""

    tokens: bytes | None
    hashes: list[bytes]
    is_single: bool
    computed: int
    min_tokens: int
    hit_tokens: int
    missed_tokens: int


class Parser:
    """State of the process: the prompt formats, and the body that is being read."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache = TokenCache(cache_bytes)
        self._encoders: OrderedDict[str, PromptEncoder] = OrderedDict()
        self._body = Body()
        self._params: RequestParams | None = None

    def serve(self, connection: Connection) -> None:
        """Answer messages until the connection is closed."""
        decode = msgspec.msgpack.Decoder(Load | Read | Validate | Encode | Finish).decode
        for_itself = time.process_time()
        while True:
            match decode(connection.recv_bytes()):
                case Load(name, format):
                    began = time.process_time()
                    limit_resources(None)
                    self._encoders[name] = PromptEncoder(format, self._cache)
                    if len(self._encoders) > MAX_FORMATS:
                        self._encoders.popitem(last=False)
                    for_itself += time.process_time() - began
                case message:
                    answer = self._answer(message, connection)
                    connection.send_bytes(msgspec.msgpack.encode((time.process_time() - for_itself, answer)))

    def _answer(self, message: Read | Validate | Encode | Finish, connection: Connection) -> RequestParams | Valid | Refusal | Tokens:
        try:
            match message:
                case Read(path, session, has_canaries, max_tokens):
                    raw = connection.recv_bytes()
                    limit_resources(max_tokens)
                    self._params, self._body = read_fields(path, raw, session, has_canaries, check_json(raw, max_tokens))
                    return self._params
                case Validate(path, max_tokens):
                    raw = connection.recv_bytes()
                    limit_resources(max_tokens)
                    check_json(raw, max_tokens)
                    validation.check(path, raw)
                    return Valid()
                case Encode(name, encoding):
                    limit_resources(encoding.max_tokens)
                    return self._encode(self._encoders[name], encoding)
                case Finish():
                    self._body, self._params = Body(), None
                    limit_resources(None)
                    trim_heap()
                    return Valid()
        except JsonTooLarge as error:
            return _refuse(validation.too_large(error))
        except ApiError as error:
            return _refuse(error)

    def _encode(self, encoder: PromptEncoder, encoding: Encoding) -> Tokens:
        assert self._params is not None, "a body was read"
        hits, misses = self._cache.hit_tokens, self._cache.missed_tokens
        encoded = encode(self._params.path, self._body, encoder, encoding)
        tokens = None if encoded.tokens is None else encoded.tokens.tobytes()
        hashes = [one.tobytes() for one in encoded.hashes]
        found = self._cache.hit_tokens - hits, self._cache.missed_tokens - misses
        return Tokens(tokens, hashes, encoded.is_single, encoded.computed, encoded.min_tokens, *found)


def _refuse(error: ApiError) -> Refusal:
    return Refusal(error.status, str(error), error.param, error.code)


def limit_resources(max_tokens: int | None) -> None:
    """Limit the CPU time and the address space from now on, for prompts of `max_tokens`; None: lift the limits."""
    cpu = memory = resource.RLIM_INFINITY
    if max_tokens is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS
        with contextlib.suppress(OSError):  # no procfs: only the CPU time is limited
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            memory = mapped + MEMORY_BYTES + TOKEN_BYTES * max_tokens
    for kind, limit in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard if resource.RLIM_INFINITY not in (limit, hard) and hard < limit else limit, hard))


def main() -> None:
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, ConnectionError):
        Parser(int(sys.argv[2])).serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
