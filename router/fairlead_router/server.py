"""The listening side: uvicorn, with bounds on headers, and a drain that Kubernetes can rely on."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fairlead_router.app import App
from fairlead_router.config import RouterConfig
from fairlead_router.errors import error_body
from fairlead_router.guard import Guard
from fairlead_router.router import Router

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of common clients' pools, so that it is not we who close under a request on its way."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol sets no bound on a request's line and headers, nor on the time that a request takes to come."""

    deadline = 0.0
    _head_bytes = 0
    _in_head = True
    _refused = False

    def __init__(self, guard: Guard, *args: Any, **kwargs: Any) -> None:
        self._guard = guard
        super().__init__(*args, **kwargs)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if not self._guard.opened(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.closed(self)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._guard.expects_head(self)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.headers) > self._guard.max_headers:
            self._refuse(431, f"The request has more than {self._guard.max_headers} headers.", "headers_too_large")
        elif self._guard.full_for(self.url.partition(b"?")[0].decode("latin-1")):
            message = f"This router has as many connections as it may ({self._guard.max_connections}). Try again in 1 s."
            self._refuse(503, message, "too_many_connections", b"retry-after: 1\r\n")
        else:
            self._guard.expects_body(self)
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._guard.whole(self)
        if not self._refused:
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_response_complete(self) -> None:
        self._guard.answered(self)
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += min(len(data), self._guard.max_header_bytes + 1)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._guard.max_header_bytes and not self.transport.is_closing():
            self._refuse(431, f"The request's headers exceed {self._guard.max_header_bytes} bytes.", "headers_too_large")

    def late(self) -> None:
        if self.transport.is_closing():
            return
        if self._in_head and not self._head_bytes:
            self.transport.abort()  # it has said nothing
        elif self._in_head or self.cycle is None or not self.cycle.response_started:
            self._refuse(408, f"The request's {'headers' if self._in_head else 'body'} took too long to come.", "request_timeout")
        else:
            self.transport.close()

    def close_idle(self) -> None:
        self.transport.close()

    def _refuse(self, status: int, message: str, code: str, header: bytes = b"") -> None:
        self._refused = True
        body = error_body(message, "invalid_request_error", code=code)
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n" % (status, HTTPStatus(status).phrase.encode())
        self.transport.write(head + header + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


class RouterServer(uvicorn.Server):
    """On SIGTERM or SIGINT: not ready, accept for `drain_grace` more, then close the listener and finish what is under way.

    A second signal ends at once.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.router = Router(config)
        self.guard = Guard(config)
        self._grace = config.drain_grace
        super().__init__(
            uvicorn.Config(
                App(self.router),
                host=config.host,
                port=config.port,
                http=partial(BoundedProtocol, self.guard),  # type: ignore[arg-type]  # called, and nothing else
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

    async def on_tick(self, counter: int) -> bool:
        self.guard.look()
        return await super().on_tick(counter)

    def _on_signal(self, number: int) -> None:
        if not self.started or self.router.proxy.draining:
            logger.info("%s again: ending now", signal.Signals(number).name)
            self.should_exit = self.force_exit = True
            return
        logger.info("%s: draining, %d requests under way", signal.Signals(number).name, len(self.server_state.tasks))
        self.router.drain()
        asyncio.get_running_loop().call_later(self._grace, self._leave)

    def _leave(self) -> None:
        self.should_exit = True
