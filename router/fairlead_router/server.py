"""Listening server: accepts connections, closes idle ones, and drains as Kubernetes expects."""

import asyncio
import logging
import signal
import socket
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import uvloop

from fairlead_common.http.client_connection import ClientConnection
from fairlead_common.http.connection_limiter import ConnectionLimiter
from fairlead_common.http.framing import bound_unsent
from fairlead_router.app import App
from fairlead_router.config import RouterConfig
from fairlead_router.errors import ListenError
from fairlead_router.router import Router
from fairlead_router.supervision import supervise
from fairlead_router.wire.tls_listener import TlsListener, bind

if TYPE_CHECKING:
    from fairlead_router.wire.tls import ServerCertificate

logger = logging.getLogger(__name__)

BACKLOG = 4096
IDLE_CHECK_SECONDS = 1.0
"""Interval between checks for clients that are idle, slow, or do not read their answers."""
FLUSH_SECONDS = 1.0
"""Time to send the last bytes of answers that the shutdown truncated."""


class RouterServer:
    """Server of one process.

    On SIGTERM or SIGINT it turns unready, accepts connections for `drain_grace` more seconds, closes the listener and finishes the
    requests in flight. A second signal ends the process immediately.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.router = Router(config)
        self._config = config
        self._certificate = self._load_certificate()
        self._limiter = ConnectionLimiter(config, _flag, self.router.handler.keys.tenant_of)
        self._app = App(self.router, "all" if config.admin_port is None else "inference")
        self._admin_app = App(self.router, "admin")
        self._admin_limiter = ConnectionLimiter(config, _flag)
        """Separate limits: clients that exhaust the inference port do not block the admin port."""
        self._connections: set[ClientConnection] = set()
        self._listener: asyncio.Server | TlsListener | None = None
        self._admin_listener: asyncio.Server | TlsListener | None = None
        self._leaving: asyncio.Event | None = None

    def _load_certificate(self) -> "ServerCertificate | None":
        """Return the certificate of `--port`; None without TLS. Raises ValueError for files that cannot be used."""
        if not self._config.ssl_certfile:
            return None
        from fairlead_router.wire.tls import ServerCertificate  # imported late: only routers with TLS need cryptography

        return ServerCertificate(self._config.ssl_certfile, self._config.ssl_keyfile, self.router.metrics.certificate_expiry.set)

    def run(self) -> None:
        """Serve on uvloop until a signal."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve())

    @property
    def started(self) -> bool:
        """Whether the server listens."""
        return self._listener is not None

    @property
    def port(self) -> int:
        """Port of the inference listener, once it has started."""
        return _port(self._listener)

    @property
    def admin_port(self) -> int:
        """Port that serves the admin paths, once it has started."""
        return _port(self._admin_listener or self._listener)

    async def serve(self) -> None:
        """Listen until `leave`, then drain. Raises ListenError."""
        loop = asyncio.get_running_loop()
        self._leaving = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self.router.start()
            try:
                await self._serve(loop, self._leaving)
            finally:
                await self.router.close()
                self._app.close()
                self._admin_app.close()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        """Accept no more connections, finish the requests in flight, then end."""
        if self._leaving is not None:
            self._leaving.set()

    async def _serve(self, loop: asyncio.AbstractEventLoop, leaving: asyncio.Event) -> None:
        if self._config.admin_port is not None:
            self._admin_listener = await self._listen(loop, "--admin-port", self._config.admin_port, self._admin_app, self._admin_limiter)
            logger.info("admin paths on http://%s:%d", self._config.host, self.admin_port)
        certificate = self._certificate
        self._listener = await self._listen(loop, "--port", self._config.port, self._app, self._limiter, certificate)
        logger.info("running on %s://%s:%d", "http" if certificate is None else "https", self._config.host, self.port)
        background = [supervise("connections", self._close_stalled, self.router.metrics.task_failures)]
        if certificate is not None:
            background.append(supervise("certificate", certificate.follow, self.router.metrics.task_failures))
        await leaving.wait()
        for task in background:
            task.cancel()
        for listener in (self._listener, self._admin_listener):
            if listener is not None:
                listener.close()
        for connection in list(self._connections):
            connection.finish()
        if tasks := self._running_tasks():
            logger.info("waiting for %d requests", len(tasks))
            _, tasks = await asyncio.wait(tasks, timeout=max(1.0, self._config.drain_timeout))
        self._cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connections:
            await asyncio.wait([connection.closed for connection in self._connections], timeout=FLUSH_SECONDS)

    async def _listen(
        self,
        loop: asyncio.AbstractEventLoop,
        flag: str,
        port: int,
        app: App,
        limiter: ConnectionLimiter,
        certificate: "ServerCertificate | None" = None,
    ) -> asyncio.Server | TlsListener:
        """Listen on `port`, which `flag` gives. Raises ListenError."""
        create_connection = partial(ClientConnection, app, self._connections, loop, limiter)
        host = self._config.host
        sockets: list[socket.socket] = []
        try:
            if host == "0.0.0.0" and socket.has_dualstack_ipv6():  # IPv6 too: a pod in an IPv6 cluster has no IPv4 address
                sockets = [socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)]
            elif certificate is not None:
                sockets = await bind(host, port, BACKLOG)
            for one in sockets:
                bound_unsent(one)
            if certificate is not None:
                return TlsListener(sockets, certificate.context, create_connection, limiter)
            if sockets:
                return await loop.create_server(create_connection, sock=sockets[0], backlog=BACKLOG)
            listener = await loop.create_server(create_connection, host, port, backlog=BACKLOG, start_serving=False)
        except OSError as error:
            raise ListenError(f"--host {host} {flag} {port}: {error}") from error
        for each in listener.sockets:
            bound_unsent(each)
        await listener.start_serving()
        return listener

    async def _close_stalled(self) -> None:
        while True:
            await asyncio.sleep(IDLE_CHECK_SECONDS)
            now = monotonic()
            self._limiter.close_overdue(now)
            self._admin_limiter.close_overdue(now)
            for connection in list(self._connections):
                connection.close_if_stalled(now)

    def _on_signal(self, number: int) -> None:
        if not self.started or self.router.proxy.draining:
            logger.info("%s again: ending now", signal.Signals(number).name)
            self.leave()
            self.router.abort()
            self._cancel(self._running_tasks())
            return
        logger.info("%s: draining, %d requests under way", signal.Signals(number).name, len(self._running_tasks()))
        self.router.drain()
        asyncio.get_running_loop().call_later(self._config.drain_grace, self._leave)

    def _leave(self) -> None:
        self.router.stop_accepting()
        self.leave()

    def _running_tasks(self) -> set[asyncio.Task[None]]:
        return {connection.task for connection in self._connections if connection.task is not None}

    @staticmethod
    def _cancel(tasks: set[asyncio.Task[None]]) -> None:
        """Cancel the tasks: streams end with an error event, other requests get a 503."""
        for task in tasks:
            task.cancel()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _port(listener: asyncio.Server | TlsListener | None) -> int:
    assert listener is not None
    port: int = listener.sockets[0].getsockname()[1]
    return port
