"""Pool of keep-alive connections to one worker."""

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from time import monotonic

from fairlead_common.discovery import split_address
from fairlead_router.wire.tcp_keepalive import enable_tcp_keepalive
from fairlead_router.wire.upstream import (
    ConnectFailed,
    Connection,
    Head,
    LostAfterHead,
    LostBeforeHead,
    Unreachable,
    UpstreamError,
    WorkerSilent,
)

CONNECT_SECONDS = 2.0
IDLE_LIMIT = 1024
"""Most idle connections to one worker. A hundred streams that end together must not cause a hundred new connections."""
IDLE_SECONDS = 30.0
STALE_SECONDS = 1.0
"""A reused connection that ends this soon after a request was written was closed by the worker's idle timer, not by that request."""
SILENCE_SECONDS = 15.0
MAX_FETCH_BYTES = 256 << 20
"""Limit of a fetched body. The largest is a prompt format: tokenizers have up to 40 MB."""
_UNREACHABLE_ERRNOS = frozenset((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT))


class ConnectionPool:
    """Connections to one worker, reused last in, first out. `silence_timeout`: seconds until one to an unreachable machine ends."""

    def __init__(self, address: str, silence_timeout: float = SILENCE_SECONDS) -> None:
        self.address = address
        self._silence_timeout = silence_timeout
        self._host, self._port = split_address(address)
        self._idle: deque[tuple[float, Connection]] = deque()
        self._busy: set[Connection] = set()
        """Connections in use, from the request until `release`."""

    async def send(
        self, request: list[bytes], timeout: float, deadline: float | None = None, fresh: bool = False
    ) -> tuple[Connection, Head]:
        """Send a request; return the connection and the answer's head. `fresh`: use a new connection.

        `timeout`: longest silence within the answer, seconds. `deadline`: monotonic seconds by which the head must arrive, including a
        resend on a new connection (None: after `timeout`). Raises ConnectFailed, LostBeforeHead, ResponseTimeout.
        """
        due = monotonic() + timeout if deadline is None else deadline
        idle, lost = None if fresh else self._take_idle(), None
        if idle is not None:
            try:
                return idle, await self._exchange(idle, request, timeout, due)
            except WorkerSilent:
                raise
            except LostBeforeHead as error:
                if idle.has_head_bytes or monotonic() - idle.sent_at > STALE_SECONDS:
                    raise
                lost = error
        try:
            connection = await self._connect()
        except ConnectFailed:
            if lost is not None:
                raise lost from None  # the worker got the request and is gone: that request may be the cause
            raise
        try:
            return connection, await self._exchange(connection, request, timeout, due)
        except LostBeforeHead as error:
            error.was_resent = lost is not None
            raise

    async def fetch(
        self,
        path: str,
        timeout: float,
        headers: dict[str, str] | None = None,
        wants_body: Callable[[Head], bool] = lambda head: True,
        method: str = "GET",
        body: bytes = b"",
    ) -> tuple[Head, bytes]:
        """Send a request and return head and body within `timeout` seconds; no body if `wanted(head)` is false.

        Raises UpstreamError, TimeoutError. A body longer than MAX_FETCH_BYTES is an UpstreamError.
        """
        lines = [f"{method} {path} HTTP/1.1", f"host: {self.address}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        if method != "GET":
            lines.append(f"content-length: {len(body)}")
        request = ["\r\n".join([*lines, "", ""]).encode("latin-1"), *([body] if body else [])]
        async with asyncio.timeout(timeout):
            connection, head = await self.send(request, 2 * timeout)  # ours comes first
            try:
                answer = bytearray()
                if wants_body(head):
                    while piece := await connection.read():
                        answer += piece
                        if len(answer) > MAX_FETCH_BYTES:
                            raise UpstreamError(f"{self.address}{path}: the answer exceeds {MAX_FETCH_BYTES >> 20} MiB")
            finally:
                self.release(connection)
        return head, bytes(answer)

    def release(self, connection: Connection) -> None:
        """Return the connection to the pool if its answer was read to the end, else close it."""
        self._busy.discard(connection)
        if connection.is_reusable and len(self._idle) < IDLE_LIMIT:
            self._idle.append((monotonic(), connection))
        else:
            connection.abort()

    def fail_unanswered(self) -> None:
        """Fail the requests whose answer has not begun, so that they can be retried elsewhere."""
        for connection in [connection for connection in self._busy if not connection.has_head]:
            connection.fail(WorkerSilent(f"{self.address} has gone silent"))

    def fail_silent(self, seconds: float) -> None:
        """Fail the answers without a byte for `seconds`: they cannot continue elsewhere, but clients must learn of it."""
        for connection in [connection for connection in self._busy if connection.has_head and connection.silent_seconds >= seconds]:
            connection.fail(LostAfterHead(f"{self.address} sent nothing for {seconds:g} s"))

    def has_recent_bytes(self, seconds: float) -> bool:
        """Return whether a byte of some answer arrived within the last `seconds`, which shows that the worker is not stopped."""
        return any(connection.has_head and connection.silent_seconds < seconds for connection in self._busy)

    def close_expired(self) -> None:
        """Close connections that were idle for IDLE_SECONDS, or that the worker has closed."""
        oldest = monotonic() - IDLE_SECONDS
        while self._idle and (self._idle[0][0] < oldest or self._idle[0][1].is_closed):
            self._idle.popleft()[1].abort()

    def close(self) -> None:
        """Close the idle connections. Connections in use stay open."""
        for _, connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(self, connection: Connection, request: list[bytes], timeout: float, due: float) -> Head:
        self._busy.add(connection)
        try:
            return await connection.exchange(request, timeout, due)
        except BaseException:
            self._busy.discard(connection)
            raise

    def _take_idle(self) -> Connection | None:
        self.close_expired()
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                transport, connection = await loop.create_connection(lambda: Connection(loop), self._host, self._port)
        except TimeoutError:
            raise Unreachable(f"no connection to {self.address} within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            kind = Unreachable if error.errno in _UNREACHABLE_ERRNOS else ConnectFailed
            raise kind(f"no connection to {self.address}: {error}") from error
        enable_tcp_keepalive(transport, self._silence_timeout)
        return connection
