"""An ASGI application behind this package's server. https://asgi.readthedocs.io/en/latest/specs/www.html"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from typing import Any

from fairlead_common.http.client_connection import Request
from fairlead_common.http.response import Reply

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class AsgiServer:
    """Answers the requests of a connection with an ASGI application."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, request: Request, reply: Reply) -> None:
        exchange = _Exchange(request, reply)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.0" if request.is_http10 else "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.target.partition(b"?")[0],
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
        }
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request and its answer, as ASGI messages."""

    def __init__(self, request: Request, reply: Reply) -> None:
        self._request, self._reply = request, reply
        request.is_streamed = True
        request.on_disconnect = self._on_disconnect
        reply.source = self
        self._has_body = False
        """The application has the whole body."""
        self._ended = asyncio.Event()
        """The answer is complete, or the client has gone."""
        self._is_writable = asyncio.Event()
        self._is_writable.set()

    async def receive(self) -> Message:
        """Return the next part of the body, and then, once the answer or the connection has ended, `http.disconnect`."""
        request = self._request
        if not self._has_body:
            while not (request.body or request.is_complete or request.is_disconnected):
                await request.wait_for_body()
        else:
            await self._ended.wait()
        if self._has_body or request.is_disconnected:
            return {"type": "http.disconnect"}
        body = request.take()
        self._has_body = request.is_complete
        return {"type": "http.request", "body": body, "more_body": not request.is_complete}

    async def send(self, message: Message) -> None:
        """Send a part of the answer, and wait while the client does not read. Nothing happens after a disconnect."""
        if self._request.is_disconnected:
            return
        if message["type"] == "http.response.start":
            self._reply.start(message["status"], [(b"date", formatdate(usegmt=True).encode()), *message.get("headers", ())])
            return
        if message.get("more_body", False):
            self._reply.write(message.get("body", b""))
            await self._is_writable.wait()
        else:
            self._reply.end(message.get("body", b""))
            self._ended.set()

    def pause(self) -> None:
        self._is_writable.clear()

    def resume(self) -> None:
        self._is_writable.set()

    def _on_disconnect(self) -> None:
        self._ended.set()
        self._is_writable.set()
