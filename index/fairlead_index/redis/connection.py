"""One pipelined connection to a Redis: replies come in the order of the commands, so any number of callers share it.

A caller that is cancelled or times out keeps only its place in that order, so the connection stays usable for the others. (A pool of
single-caller connections must discard a connection for each abandoned reply.)
"""

import asyncio
import contextlib
import re
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import hiredis

from fairlead_index.redis.access import Address

Command = tuple[bytes | str | int | float, ...]
OnLate = Callable[[Any], None]
"""Takes the last reply to a caller that left before it came."""


_IN_SCRIPT: Final = re.compile(r": -([A-Z]+) ")


class RedisError(Exception):
    """A command failed."""


class ReplyError(RedisError):
    """An error reply. `code` is its first word: NOPERM, OOM, READONLY, MOVED, NOSCRIPT..."""

    @property
    def code(self) -> str:
        text = str(self)
        inner = _IN_SCRIPT.search(text) if text.startswith("ERR Error running script") else None  # Redis 6.2 wraps the error
        return inner[1] if inner else text.partition(" ")[0]


class _Request:
    """Commands written together, and their replies so far."""

    __slots__ = ("count", "future", "on_late", "replies", "sent_at")

    def __init__(self, count: int, future: "asyncio.Future[list[Any]]", sent_at: float, on_late: OnLate | None) -> None:
        self.count, self.future, self.sent_at, self.on_late, self.replies = count, future, sent_at, on_late, list[Any]()


_INCOMPLETE: Final = False  # what hiredis returns without a complete reply
MAX_REPLY_BYTES: Final = 16 << 20
"""Limit of one reply. The index's largest is a few MB. A server that sends more is broken or hostile, and hiredis would buffer it all."""


class Connection(asyncio.Protocol):
    """A shared connection, created by `connect`."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._received_at = 0.0
        """Time of the last received bytes, on the event loop's clock."""
        self._reader: Any = hiredis.Reader(protocolError=RedisError, replyError=ReplyError)
        self._requests: deque[_Request] = deque()
        self._incomplete_bytes = 0
        """Bytes since the last complete reply."""
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def silent_seconds(self) -> float:
        """Seconds without a byte while a reply is due. A cancelled caller's reply stays due."""
        return self._loop.time() - max(self._received_at, self._requests[0].sent_at) if self._requests else 0.0

    def send(self, commands: Sequence[Command], on_late: OnLate | None = None) -> "asyncio.Future[list[Any]]":
        """Write the commands without others between them. Error replies are among the replies. Raises ConnectionError.

        `on_late`: called with the last reply if the returned future was cancelled before.
        """
        if not self.is_open:
            raise ConnectionResetError("the connection to redis is closed")
        request = _Request(len(commands), self._loop.create_future(), self._loop.time(), on_late)
        self._requests.append(request)
        self._transport.write(b"".join([hiredis.pack_command(command) for command in commands]))
        return request.future

    def abort(self) -> None:
        """Close immediately. Waiting callers get a ConnectionError."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._received_at = self._loop.time()

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        try:
            self._reader.feed(data)
            self._incomplete_bytes += len(data)
            if self._incomplete_bytes > MAX_REPLY_BYTES:
                self._fail(RedisError(f"redis sent more than {MAX_REPLY_BYTES >> 20} MiB for one reply: is it a Redis?"))
                self.abort()
                return
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                self._incomplete_bytes = 0
                request = self._requests[0]
                request.replies.append(reply)
                if len(request.replies) == request.count:
                    self._requests.popleft()
                    if not request.future.done():
                        request.future.set_result(request.replies)
                    elif request.on_late is not None and request.future.cancelled():
                        request.on_late(reply)
        except (RedisError, IndexError):  # not RESP, or a reply without a request
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionResetError(f"redis closed the connection: {exc or 'end of stream'}"))

    def _fail(self, error: Exception) -> None:
        """Fail all waiting callers with `error`."""
        for request in self._requests:
            if not request.future.done():
                request.future.set_exception(error)
        self._requests.clear()


async def connect(address: Address, tls: ssl.SSLContext | None) -> Connection:
    """Open a connection. Raises OSError if the server cannot be reached or its certificate does not match."""
    loop = asyncio.get_running_loop()
    host, port = address
    if not port:
        _, connection = await loop.create_unix_connection(lambda: Connection(address), host)
        return connection
    transport, connection = await loop.create_connection(
        lambda: Connection(address), host, port, ssl=tls, server_hostname=host if tls else None
    )
    with contextlib.suppress(OSError):  # keepalive detects a lost peer on an idle connection
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection
