"""One connection to a Redis: commands go out as they come, replies come back in order, so any number of callers share it.

A caller that gives up, by cancellation or at its deadline, leaves its place in the order behind and nothing else: the connection stays
good for the others and none is lost. (A pool of one-caller connections must throw a connection away for each reply that nobody waits for.)
"""

import asyncio
import contextlib
import re
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import hiredis

from fairlead_index.redis.access import Address

Command = tuple[bytes | str | int | float, ...]


_IN_SCRIPT: Final = re.compile(r": -([A-Z]+) ")


class RedisError(Exception):
    """Redis did not do it."""


class ReplyError(RedisError):
    """Redis said why not. `code` is its first word: NOPERM, OOM, READONLY, MOVED, NOSCRIPT..."""

    @property
    def code(self) -> str:
        text = str(self)
        inner = _IN_SCRIPT.search(text) if text.startswith("ERR Error running script") else None  # so Redis 6.2 quotes what a command said
        return inner[1] if inner else text.partition(" ")[0]


class _Request:
    """Commands written together, and their replies so far."""

    __slots__ = ("count", "future", "replies")

    def __init__(self, count: int, future: "asyncio.Future[list[Any]]") -> None:
        self.count, self.future, self.replies = count, future, list[Any]()


_MORE: Final = False  # what hiredis returns when no whole reply is there
MAX_REPLY_BYTES: Final = 16 << 20
"""Of one reply. The largest of the index is a few MB; a server that sends more is broken or hostile, and hiredis would keep it all."""


class Connection(asyncio.Protocol):
    """Made by `connect`."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.heard = 0.0
        """When bytes last came, in the event loop's time."""
        self._reader: Any = hiredis.Reader(protocolError=RedisError, replyError=ReplyError)
        self._requests: deque[_Request] = deque()
        self._incomplete = 0
        """Bytes since the last whole reply."""
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, commands: Sequence[Command]) -> "asyncio.Future[list[Any]]":
        """Writes the commands, one after the other, with nothing between. Errors stand among the replies. Raises ConnectionError."""
        if not self.open:
            raise ConnectionResetError("the connection to redis is closed")
        request = _Request(len(commands), self._loop.create_future())
        self._requests.append(request)
        self._transport.write(b"".join([hiredis.pack_command(command) for command in commands]))
        return request.future

    def abort(self) -> None:
        """Closes at once. Whoever waits gets a ConnectionError."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.heard = self._loop.time()

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        try:
            self._reader.feed(data)
            self._incomplete += len(data)
            if self._incomplete > MAX_REPLY_BYTES:
                self._fail(RedisError(f"redis sent more than {MAX_REPLY_BYTES >> 20} MiB for one reply: is it a Redis?"))
                self.abort()
                return
            while (reply := self._reader.gets()) is not _MORE:
                self._incomplete = 0
                request = self._requests[0]
                request.replies.append(reply)
                if len(request.replies) == request.count:
                    self._requests.popleft()
                    if not request.future.done():
                        request.future.set_result(request.replies)
        except (RedisError, IndexError):  # not RESP, or an answer that nobody asked for
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionResetError(f"redis closed the connection: {exc or 'end of stream'}"))

    def _fail(self, error: Exception) -> None:
        """Give `error` to all callers that wait."""
        for request in self._requests:
            if not request.future.done():
                request.future.set_exception(error)
        self._requests.clear()


async def connect(address: Address, tls: ssl.SSLContext | None) -> Connection:
    """Raises OSError: away, or not who its certificate says."""
    loop = asyncio.get_running_loop()
    host, port = address
    if not port:
        _, connection = await loop.create_unix_connection(lambda: Connection(address), host)
        return connection
    transport, connection = await loop.create_connection(
        lambda: Connection(address), host, port, ssl=tls, server_hostname=host if tls else None
    )
    with contextlib.suppress(OSError):  # a peer that a node's end took along is noticed even while nobody asks
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection
