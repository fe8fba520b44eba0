"""A server that speaks Redis' protocol and answers every command with the bytes that a test chooses."""

import asyncio
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from hypothesis import strategies as st

RAW: Final = (
    b"_\r\n",
    b",nan\r\n",
    b",-inf\r\n",
    b"#t\r\n",
    b"%1\r\n+a\r\n:1\r\n",
    b"%1\r\n*1\r\n:1\r\n:2\r\n",  # hiredis raises TypeError
    b"~1\r\n:1\r\n",
    b"(123456789012345678901234567890\r\n",
    b"*-1\r\n",
    b"*1000000000\r\n",
    b"~1000000000\r\n:1\r\n",
    b">1000000000\r\n:1\r\n",  # nineteen seconds to free
    b"*1\r\n*1000000000\r\n",
    b"*4294967295\r\n",  # hiredis raises MemoryError
    b"*9999999\r\n" * 3,
    b"$99999999999\r\n",
    b"*1\r\n" * 200 + b":1\r\n",
    b":not a number\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"-MOVED\r\n",
    b"-MOVED 1 nowhere\r\n",
    b"-MOVED 1 127.0.0.1:1\r\n",
    b"-NOSCRIPT x\r\n",
    b"-ERR \xff\xfe\r\n",
    b"-\r\n",
    b"+\r\n",
    b"*2\r\n-ERR inside\r\n$1\r\na\r\n",
)
"""Replies that no list of values gives."""


def encode(value: Any) -> bytes:
    """Return a value in Redis' protocol."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, Exception):
        return b"-%b\r\n" % str(value).encode()
    return b"*%d\r\n%b" % (len(value), b"".join(map(encode, value)))


def replies(addresses: list[str], incarnation: str) -> st.SearchStrategy[bytes]:
    """Return any replies, many of them almost as the index's scripts give them, about workers at `addresses`."""
    integers = st.integers(-(2**63), 2**63 - 1)
    floats = st.floats(width=64).map(lambda value: struct.pack("<d", value))
    texts = st.sampled_from([b"-inf", b"inf", b"nan", b"-1", b"0", b"1", b"1e400", b"1e300", b"1e-320", b"9" * 400, b"\xff\xfe", b""])
    addressed = st.sampled_from([address.encode() for address in addresses]) | st.binary(max_size=30)
    epoch = st.just(bytes.fromhex(incarnation)) | st.binary(min_size=8, max_size=8)
    slot = st.just(b"\0\1") | st.binary(min_size=2, max_size=2)
    candidate = st.builds(
        lambda *part: struct.pack("<qqB8s2s", *part[:5]) + part[5], integers, integers, st.integers(0, 255), epoch, slot, addressed
    )
    holder = st.builds(lambda tokens, epoch, address: struct.pack("<q8s", tokens, epoch) + address, integers, epoch, addressed)
    number = texts | integers.map(lambda value: b"%d" % value) | st.floats().map(lambda value: repr(value).encode())
    row = st.tuples(addressed, addressed, number, texts, *[number] * 13, epoch).map(list)
    rows = st.lists(row, max_size=3).map(lambda found: [value for each in found for value in each])
    change = st.builds(
        lambda sign, slot, id, cost: sign + slot + id + cost, st.sampled_from([b"+", b"-"]), slot, st.binary(min_size=8, max_size=8), floats
    )
    position = st.sampled_from([b"1-1", b"x", b"", b"1", b"9" * 5000 + b"-1"])
    card = st.builds(lambda a, b, c, d: a + b + c + d, floats, epoch, floats, st.just(b"\x04\0")).flatmap(
        lambda head: addressed.map(lambda a: head + a)
    )
    hash_all = st.lists(st.tuples(slot | st.binary(max_size=3), card | st.binary(max_size=60)), max_size=4).map(
        lambda found: [v for each in found for v in each]
    )
    record = st.sampled_from([b"J", b"K", b"A", b"?", b""]).flatmap(
        lambda kind: st.binary(max_size=60).map(lambda rest: kind + b"\0\1" + rest)
    )
    entry = st.tuples(st.sampled_from([b"1-0", b"2-0", b"x"]), st.lists(record | st.just(b"r"), max_size=3).map(list)).map(list)
    log = st.lists(entry, max_size=3).map(lambda entries: [[b"log", entries]])
    meta = st.lists(st.none() | texts, max_size=4)
    snapshot = st.tuples(meta, hash_all, st.binary(max_size=40), st.just([b"1", b"2"]) | meta).map(list)
    check = st.tuples(meta, st.binary(max_size=40), st.just([b"1", b"2"]), meta, st.lists(entry, max_size=2)).map(list)
    near = st.one_of(
        st.tuples(st.binary(max_size=20), st.lists(candidate, max_size=10)).map(lambda parts: [parts[0], *parts[1]]),
        st.lists(holder, max_size=4),
        rows,
        st.tuples(position, st.lists(change, max_size=3).map(b"".join)).map(list),
        hash_all,
        log,
        snapshot,
        check,
        st.just([b"OK"]),
    )
    leaf = (
        st.none()
        | integers
        | st.binary(max_size=40)
        | texts
        | st.builds(ValueError, st.sampled_from(["ERR x", "MOVED", "OOM", "READONLY y"]))
    )
    anything = st.recursive(leaf, lambda inner: st.lists(inner, max_size=5), max_leaves=12)
    return near.map(encode) | anything.map(encode) | st.sampled_from(RAW) | st.binary(max_size=40).map(lambda data: data + b"\r\n")


class HostileRedis:
    """Listens on 127.0.0.1. `reply`: returns the answer to the next command; empty closes the connection."""

    def __init__(self, reply: Callable[[], bytes]) -> None:
        self.reply = reply
        self.commands = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> "HostileRedis":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    await reader.readexactly(size + 2)
                self.commands += 1
                answer = self.reply()
                if not answer:
                    break
                writer.write(answer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
