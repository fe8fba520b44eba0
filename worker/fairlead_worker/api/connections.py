"""Clients' connections: uvicorn's, with bounds on their number, on the bytes of a head, and on the time that a request takes to come.

uvicorn bounds none of these, and a client that opens a thousand connections and says nothing would hold each for ever.
"""

import asyncio
from functools import partial
from time import monotonic
from typing import Any
from urllib.parse import unquote

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fairlead_index.guard import Guard, Limits
from fairlead_worker.api.errors import ApiError

LOOK_SECONDS = 1.0
STALL_SECONDS = 600.0
"""A client that takes nothing of an answer for so long is taken for gone."""
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}


class Connections:
    """All of them. `protocol` makes one, for uvicorn."""

    def __init__(self, limits: Limits) -> None:
        self.guard: Guard[Connection] = Guard(limits)
        self.protocol = partial(Connection, self.guard)

    async def look_after(self) -> None:
        """Until cancelled: end those that are late, or take nothing of their answer."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = monotonic()
            self.guard.look(now)
            for connection in self.guard:
                connection.look(now)


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, guard: "Guard[Connection]", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deadline = 0.0
        self._guard = guard
        self._head_bytes = 0
        self._in_body = self._finished = False
        self._stalled: float | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if not self._guard.opened(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._finished:
            return
        if not self._in_body:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_body and self._head_bytes > self._guard.max_header_bytes:
            self._refuse_head()

    def pause_writing(self) -> None:
        self._stalled = monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled = None
        super().resume_writing()

    # httptools

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._guard.expects_head(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # what follows a body is no header: nobody counts its bytes, and it must not become one
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._finished:
            return  # it follows a refusal, in the same read
        limit = self._guard.max_header_bytes
        if self._head_bytes > limit < sum(len(name) + len(value) for name, value in self.headers) + len(self.url):
            self._refuse_head()
            return
        if len(self.headers) > self._guard.max_headers:
            message = f"the request has {len(self.headers)} headers, more than {self._guard.max_headers} (--max-headers)"
            self._refuse(431, message, "headers_too_large")
            return
        if any(name == b"transfer-encoding" and value.strip().lower() != b"chunked" for name, value in self.headers):
            self._refuse(400, "Transfer-Encoding: chunked is the only one known here", "bad_request")
            return
        if self._guard.full_for(unquote(self.url.partition(b"?")[0].decode("latin-1"))):
            message = f"this worker has as many connections as it may ({self._guard.max_connections}, --max-connections)"
            self._refuse(503, message, "too_many_connections")
            return
        self._in_body, self._head_bytes = True, 0
        self._guard.expects_body(self)
        super().on_headers_complete()
        if self.pipeline:
            self._guard.whole(self)  # the one before it is not answered yet, and nothing is read until it is

    def on_body(self, body: bytes) -> None:
        if not self._finished:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._guard.whole(self)
        if not self._finished:
            super().on_message_complete()
            if self.cycle.response_complete:  # answered before the body was all there
                self._guard.answered(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body:
            self._guard.expects_body(self)
        elif self._head_bytes:
            self._guard.expects_head(self)
        elif self.cycle.response_complete:
            self._guard.answered(self)

    def send_400_response(self, msg: str) -> None:
        """For what is not HTTP: uvicorn would answer in plain text."""
        self._refuse(400, msg, "bad_request")

    # What the guard asks

    def late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete and not self._in_body:
            return  # it is the request after the one under way, which is not read now
        if not self._in_body and not self._head_bytes:
            self.transport.abort()  # it has said nothing
            return
        what = "body" if self._in_body else "headers"
        self._refuse(408, f"the request's {what} took too long to come (--{what.rstrip('s')}-timeout)", "request_timeout")

    def close_idle(self) -> None:
        self.transport.close()

    def look(self, now: float) -> None:
        if self._stalled is not None and now - self._stalled > STALL_SECONDS:
            self.transport.abort()

    def _refuse_head(self) -> None:
        message = f"the request's headers exceed {self._guard.max_header_bytes} bytes (--max-header-bytes)"
        self._refuse(431, message, "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """For what is not a request: no endpoint knows of it."""
        if self._finished:
            return
        self._finished = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (cycle.response_started or not self._in_body):
            if cycle.response_started and self._in_body:
                self.transport.close()  # it was answered without its body, and more of that is not waited for
            else:
                cycle.keep_alive = False  # its answer comes first, and then the end: ours would be taken for it
            return
        body = ApiError(status, message, code=code).body()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n"
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        self.transport.write(head % (status, _REASONS[status], retry, len(body)) + body)
        self.transport.close()
