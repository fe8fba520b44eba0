"""The listening side: uvicorn, with bounds on headers, and a drain that Kubernetes can rely on."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fairlead_router.app import App
from fairlead_router.config import RouterConfig
from fairlead_router.errors import error_body
from fairlead_router.router import Router

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of common clients' pools, so that it is not we who close under a request on its way."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol sets no bound on a request's line and headers; a client could fill the memory with them."""

    _head_bytes = 0
    _in_head = True

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += min(len(data), MAX_HEADER_BYTES + 1)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            body = error_body(f"The request's headers exceed {MAX_HEADER_BYTES} bytes.", "invalid_request_error", code="headers_too_large")
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            self.transport.close()


class RouterServer(uvicorn.Server):
    """On SIGTERM or SIGINT: not ready, accept for `drain_grace` more, then close the listener and finish what is under way.

    A second signal ends at once.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.router = Router(config)
        self._grace = config.drain_grace
        super().__init__(
            uvicorn.Config(
                App(self.router),
                host=config.host,
                port=config.port,
                http=BoundedProtocol,
                ws="none",
                lifespan="on",
                loop="uvloop",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=4096,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=max(1, int(config.drain_timeout)),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # uvicorn's raises the signal again at the end: exit code 143, not 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if not self.started or self.router.proxy.draining:
            logger.info("%s again: ending now", signal.Signals(number).name)
            self.should_exit = self.force_exit = True
            return
        logger.info("%s: draining, %d requests under way", signal.Signals(number).name, len(self.server_state.tasks))
        self.router.drain()
        asyncio.get_running_loop().call_later(self._grace, self._leave)

    def _leave(self) -> None:
        self.router.leave()
        self.should_exit = True
