"""Keep-alive connections to one worker."""

import asyncio
from collections.abc import Callable
from time import monotonic

from fairlead_router.upstream import ConnectFailed, Connection, GoneSilent, Head, LostBeforeHead

CONNECT_SECONDS = 2.0
IDLE_LIMIT = 128
"""Idle connections kept for one worker; more are closed."""
IDLE_SECONDS = 30.0
STALE_SECONDS = 1.0
"""A kept connection that ends this soon after a request was written had been closed by its idle timer, not by that request."""


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises ValueError that names the address."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


class Pool:
    """Connections to one worker, the latest used first."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._host, self._port = split_address(address)
        self._idle: list[tuple[float, Connection]] = []
        self._waiting: set[Connection] = set()

    async def begin(self, request: list[bytes], timeout: float) -> tuple[Connection, Head]:
        """Send a request, give the connection and the answer's head. Raises ConnectFailed, LostBeforeHead, TooSilent."""
        kept, lost = self._take(), None
        if kept is not None:
            try:
                return kept, await self._exchange(kept, request, timeout)
            except GoneSilent:
                raise
            except LostBeforeHead as error:
                if monotonic() - kept.sent_at > STALE_SECONDS:
                    raise
                lost = error
        try:
            fresh = await self._connect()
        except ConnectFailed:
            if lost is not None:
                raise lost from None  # it took the request and is gone: that request may be the cause
            raise
        return fresh, await self._exchange(fresh, request, timeout)

    async def fetch(
        self, path: str, timeout: float, headers: dict[str, str] | None = None, wanted: Callable[[Head], bool] = lambda head: True
    ) -> tuple[Head, bytes]:
        """A GET, whole, within `timeout` seconds; of an answer whose head is not `wanted`, no body. Raises UpstreamError, TimeoutError."""
        lines = [f"GET {path} HTTP/1.1", f"host: {self.address}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        async with asyncio.timeout(timeout):
            connection, head = await self.begin(["\r\n".join([*lines, "", ""]).encode("latin-1")], timeout)
            try:
                body = bytearray()
                if wanted(head):
                    while piece := await connection.read():
                        body += piece
            finally:
                self.give_back(connection)
        return head, bytes(body)

    def give_back(self, connection: Connection) -> None:
        """Keep it for the next request if its answer was read to the end, else close it."""
        if connection.reusable and len(self._idle) < IDLE_LIMIT:
            self._idle.append((monotonic(), connection))
        else:
            connection.abort()

    def abandon(self) -> None:
        """End the exchanges whose answer has not begun, so that they can be tried elsewhere."""
        for connection in list(self._waiting):
            connection.fail(GoneSilent(f"{self.address} has gone silent"))

    def close(self) -> None:
        """Close what is idle; exchanges under way go on."""
        for _, connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(self, connection: Connection, request: list[bytes], timeout: float) -> Head:
        self._waiting.add(connection)
        try:
            return await connection.exchange(request, timeout)
        finally:
            self._waiting.discard(connection)

    def _take(self) -> Connection | None:
        oldest = monotonic() - IDLE_SECONDS
        while self._idle:
            since, connection = self._idle.pop()
            if since < oldest:
                connection.abort()
                self.close()  # the rest is older still
                return None
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(lambda: Connection(loop), self._host, self._port)
        except TimeoutError:
            raise ConnectFailed(f"no connection to {self.address} within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise ConnectFailed(f"no connection to {self.address}: {error}") from error
        return connection
