"""Listener of the TLS port. A connection counts against `--max-connections` from its accept on, not only after its handshake.

`loop.create_server(ssl=…)` reports a connection after its handshake, so clients that send nothing would hold sockets without a limit.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from fairlead_common.http.connection_limiter import ConnectionLimiter

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Time for a client's handshake: two round trips and one signature."""
CLOSE_SECONDS = 5.0
"""Time for a client to answer the end of a TLS session, before its connection is closed."""
ACCEPT_RETRY_SECONDS = 1.0
"""Pause after a failed accept, such as one without a free file descriptor."""

CreateConnection = Callable[["Handshake"], asyncio.BaseProtocol]
"""Creates the connection that replaces a handshake in the limiter."""


class Handshake:
    """A connection whose TLS handshake is not complete."""

    def __init__(self) -> None:
        self.deadline = 0.0
        self.task: asyncio.Task[None] | None = None

    def on_timeout(self) -> None:
        self.close_idle()

    def close_idle(self) -> None:
        if self.task is not None:
            self.task.cancel()


class TlsListener:
    """Accepts connections on `sockets` until `close`."""

    def __init__(
        self, sockets: Sequence[socket.socket], context: ssl.SSLContext, create_connection: CreateConnection, limiter: ConnectionLimiter
    ) -> None:
        """Start to accept. The listener owns the sockets."""
        self.sockets = sockets
        self._context, self._create_connection, self._limiter = context, create_connection, limiter
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[Handshake] = set()
        for one in sockets:
            one.setblocking(False)
        self._tasks = [self._loop.create_task(self._accept(one)) for one in sockets]

    def close(self) -> None:
        """Accept no more connections and end the handshakes under way. Other connections go on."""
        for task in self._tasks:
            task.cancel()
        for handshake in self._handshakes:
            handshake.close_idle()
        for one in self.sockets:
            self._loop.call_soon(one.close)  # after the cancelled accepts have left the event loop

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(listening)
            except OSError as error:
                logger.error("cannot accept a connection, again in %.0f s: %s", ACCEPT_RETRY_SECONDS, error)
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            handshake = Handshake()
            if not self._limiter.add(handshake):
                client.close()
                continue
            self._handshakes.add(handshake)
            handshake.task = self._loop.create_task(self._shake_hands(handshake, client))

    async def _shake_hands(self, handshake: Handshake, client: socket.socket) -> None:
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                lambda: self._create_connection(handshake),
                client,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=CLOSE_SECONDS,
            )
        except OSError as error:  # of TLS too
            logger.debug("TLS handshake: %s", error)
        finally:
            self._handshakes.discard(handshake)
            self._limiter.remove(handshake)


async def bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return listening sockets for all addresses of `host`. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            sockets.append(socket.create_server(address, family=family, backlog=backlog))
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets
