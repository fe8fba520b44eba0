"""Client connection: requests are parsed with httptools, answered one after the other, and bounded in every direction.

The connections of router and worker. With uvicorn's own a small request through the router took twice the time, and each piece of a stream
woke a task (docs/benchmarks/router.md has the figures); nor do they bound connections, headers, trailers, read-ahead requests and times.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, cast
from urllib.parse import unquote

import httptools

from fairlead_common.http.connection_limiter import MAX_HEADER_BYTES, MAX_HEADERS, PROBE_PATHS, ConnectionLimiter, LimitedConnection
from fairlead_common.http.framing import FRAGMENT, REFUSAL_LINGER_SECONDS, UPGRADE_WITH_BODY, WRITE_HIGH_WATER, Framing, body_headers
from fairlead_common.http.head import find_fault
from fairlead_common.http.response import Headers, Reply
from fairlead_common.protocols import errors

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Longer than the idle timeout of common clients' pools, so that the server does not close a connection under an arriving request."""
_WITHOUT_BODY = frozenset(("GET", "HEAD"))
"""Methods whose body has no meaning (RFC 9110, 9.3.1). It is dropped: unread, it would fill memory until the answer ends."""
STREAMED_BYTES = 256 * 1024
"""Unread bytes of a streamed body at which reading from its client pauses."""
STALL_SECONDS = 600
"""A client that reads nothing of an answer for this long is considered gone."""


class Request:
    """Request head, and the body as it arrives."""

    def __init__(self, connection: "ClientConnection") -> None:
        self._connection = connection
        self._waiter: asyncio.Future[None] | None = None
        self.method, self.target, self.path, self.query = "", b"", "", b""
        self.headers: Headers = []
        """Names in lower case."""
        self.keep_alive = self.is_http10 = False
        self.body = bytearray()
        """Received and unread bytes of the body. One buffer, because a list of small pieces costs 20 times their bytes."""
        self.received = 0
        """Received bytes of the body."""
        self.pieces = 0
        """Pieces in which the body was parsed: its chunks, or what was read at once."""
        self.is_complete = False
        """The whole body has arrived."""
        self.started_at = 0.0
        """When the server began with it: before its turn, after the answers before it. Monotonic seconds."""
        self.has_turn = False
        """The application handles it. Before that no more than a streamed body's bytes are read."""
        self.is_streamed = False
        """The body is read while it arrives: reading from the client pauses when much is unread."""
        self.extends_timeout = False
        """The timeout of a streamed body starts again when reading continues."""
        self.is_disconnected = False
        """The client has closed the connection, and `on_disconnect` was called, or the task was cancelled."""
        self.on_disconnect: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.reply: Reply | None = None

    @property
    def is_encrypted(self) -> bool:
        """Whether the client's connection has TLS that ends here."""
        return self._connection.is_encrypted

    def take(self) -> bytes:
        """Return the bytes of the body that arrived since the last call."""
        body, self.body = self.body, bytearray()
        if self.is_streamed and body:
            self._connection.continue_body(self)
        return bytes(body)

    async def wait_for_body(self) -> None:
        """Wait until more of the body arrives or it is complete. A client that expects `100 Continue` gets it."""
        self._connection.send_continue(self)
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def disconnect(self) -> None:
        """Tell the application that the client has gone."""
        self.is_disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()
            self.wake()
        elif self.task is not None:
            self.task.cancel()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


App = Callable[[Request, Reply], Awaitable[None]]


class ClientConnection(asyncio.BufferedProtocol):
    """Connection that parses requests and runs the application for one at a time, in a task that a disconnect cancels.

    Memory is bounded: at most one request is read ahead, and it starts only when the previous answers are below the high-water mark.
    """

    def __init__(
        self,
        app: App,
        connections: "set[ClientConnection]",
        loop: asyncio.AbstractEventLoop,
        limiter: ConnectionLimiter,
        handshake: LimitedConnection | None = None,
    ) -> None:
        """`handshake`: the entry in the limiter that the connection replaces."""
        self._app, self._connections, self._loop, self._limiter = app, connections, loop, limiter
        self._handshake = handshake
        self.deadline = 0.0
        self._parser: Any = httptools.HttpRequestParser(self)
        self._head: Request | None = None
        self._parsing: Request | None = None
        self._serving: Request | None = None
        self._next: Request | None = None
        """Next request, sent before the current answer was read (pipelining)."""
        self._framing = Framing()
        self._unparsed = b""
        """Rest of the read that contained `_next`. Reading pauses until that request starts."""
        self._reading = True
        self._trailers = 0
        self._parsing_stopped = self._closing = False
        self._last_activity = monotonic()
        self._write_paused_at: float | None = None
        self.closed: asyncio.Future[None] = loop.create_future()

    @property
    def is_encrypted(self) -> bool:
        return self._transport.get_extra_info("ssl_object") is not None

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self._connections.add(self)
        if not self._limiter.add(self, self._handshake):
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._framing.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._last_activity = monotonic()
        if not self._parsing_stopped:
            self._feed(self._framing.last_read(nbytes))

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse up to the head of the first request that must wait; keep the rest unparsed."""
        start = 0
        while start < len(data) and not self._parsing_stopped and self._next is None:
            end = self._framing.cut(data, start)
            if self._parsing is None and self._framing.overhead > MAX_HEADER_BYTES:
                self._refuse_head("headers exceed")
                return
            self._parse(data[start:end] if start or end < len(data) else data)
            start = end
        if self._next is not None and not self._parsing_stopped:
            self._unparsed = bytes(data[start:])
            self._pause_reading()

    def _parse(self, piece: bytes | memoryview) -> None:
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._parsing_stopped = self._closing = True  # no other protocol is supported: answer without the upgrade, then close
        except httptools.HttpParserError as error:
            self._refuse(400, b"Bad Request", f"The request is not HTTP: {error}.", "bad_request")
            return
        if self._parsing is not None and self._framing.overhead > MAX_HEADER_BYTES:
            self._refuse_head("chunk headers and trailers exceed")

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._limiter.remove(self)
        self.closed.set_result(None)
        self._next, self._unparsed = None, b""
        self._parser = None  # breaks the reference cycle, so that both are freed immediately
        request = self._serving
        if request is not None:
            request.disconnect()

    def pause_writing(self) -> None:
        self._write_paused_at = monotonic()
        if self._serving is not None and self._serving.reply is not None:
            self._serving.reply.pause()

    def resume_writing(self) -> None:
        self._write_paused_at = None
        if self._serving is not None and self._serving.reply is not None:
            self._serving.reply.resume()
        else:
            self._loop.call_soon(self._resume)

    # httptools

    def on_message_begin(self) -> None:
        self._head = Request(self)
        self._limiter.start_head_timeout(self)

    def on_url(self, url: bytes) -> None:
        assert self._head is not None
        self._head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is not None:
            self._head.headers.append((name.lower(), value))
            return
        self._trailers += 1  # a trailer is dropped: it becomes no header
        if self._trailers == MAX_HEADERS + 1:
            message = f"The request has more than {MAX_HEADERS} trailers."
            self._refuse(431, b"Request Header Fields Too Large", message, "headers_too_large")

    def on_headers_complete(self) -> None:
        request, self._head = self._head, None
        assert request is not None
        if len(request.headers) > MAX_HEADERS:
            message = f"The request has {len(request.headers)} headers, more than {MAX_HEADERS}."
            self._refuse(431, b"Request Header Fields Too Large", message, "headers_too_large")
            return
        self._parsing = request
        self._trailers = 0
        if self._parsing_stopped:
            return  # an earlier request was refused
        request.method = self._parser.get_method().decode("ascii")
        request.keep_alive = self._parser.should_keep_alive()
        request.is_http10 = self._parser.get_http_version() == "1.0"
        length, codings = body_headers(request.headers)
        self._framing.reset(length)
        if fault := find_fault(self._parser.get_http_version(), request.headers):
            self._refuse(400, b"Bad Request", fault, "bad_request")
            return
        if codings and request.is_http10:  # RFC 9112, 6.1: an intermediary may not support it
            self._refuse(400, b"Bad Request", "An HTTP/1.0 request has no Transfer-Encoding.", "bad_request")
            return
        if any(coding.strip().lower() != b"chunked" for coding in codings):
            self._refuse(400, b"Bad Request", "Transfer-Encoding: only chunked is supported here.", "bad_request")
            return
        if self._parser.should_upgrade() and (length or codings):
            self._refuse(400, b"Bad Request", UPGRADE_WITH_BODY, "bad_request")
            return
        if not request.target.isascii():
            self._refuse(400, b"Bad Request", "The request target has bytes beyond ASCII: write them as %XX.", "bad_request")
            return
        if b"#" in request.target:
            self._refuse(400, b"Bad Request", FRAGMENT, "bad_request")
            return
        if not request.target.startswith(b"/"):
            _strip_origin(request)
        path, _, request.query = request.target.partition(b"?")
        if path.endswith(b"/") and path != b"/" and not path.endswith(b"//"):  # some clients join a base URL and a path so
            path = path[:-1]
        request.path = path.decode("latin-1")
        if b"%" in path:
            request.path = unquote(request.path)
        if self._limiter.is_full_for(request.path):
            most = f"{self._limiter.max_connections}, {self._limiter.setting('max_connections')}"
            message = f"This server has as many connections as it may ({most}). Try again in 1 s."
            self._refuse(503, b"Service Unavailable", message, "too_many_connections", b"retry-after: 1\r\n")
            return
        self._limiter.start_body_timeout(self)
        if self._serving is None and self._write_paused_at is None:
            self._serve(request)
        else:
            self._next = request
            self.deadline = 0.0  # no body timeout while reading is paused

    def on_body(self, body: bytes) -> None:
        request = self._parsing
        self._framing.count_body(len(body))
        if request is None or (request.reply is not None and request.reply.ended):
            return  # refused, or answered without its body
        if request.method in _WITHOUT_BODY:
            return
        request.received += len(body)
        request.pieces += 1
        request.body += body
        if len(request.body) > STREAMED_BYTES and (request.is_streamed or not request.has_turn):
            self._pause_reading()
        request.wake()

    def on_message_complete(self) -> None:
        request, self._parsing = self._parsing, None
        self._framing.reset()
        self.deadline = 0.0
        if request is not None:
            request.is_complete = True
            request.wake()

    # One request after the other

    def send_continue(self, request: Request) -> None:
        """Send `100 Continue` to a client that waits for it (RFC 9110, 10.1.1), unless the request was refused without its body."""
        if request.reply is not None and request.reply.started:
            return
        if not request.received and not request.is_complete and (b"expect", b"100-continue") in request.headers:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def continue_body(self, request: Request) -> None:
        """Read on, because what was read of a streamed body has been taken."""
        if request.is_complete or self._transport.is_closing():
            return
        if request.extends_timeout:
            self._limiter.start_body_timeout(self)
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def _serve(self, request: Request) -> None:
        self._serving = request
        request.started_at = self._last_activity
        reply = request.reply = Reply(self._transport, request.method, request.keep_alive and not self._closing, request.is_http10)
        request.task = self._loop.create_task(self._answer(request, reply))

    async def _answer(self, request: Request, reply: Reply) -> None:
        try:
            await self._wait_for_turn(request)
            await self._app(request, reply)
        except asyncio.CancelledError:  # before its turn: the application answers in its own way
            if not request.is_disconnected and not reply.started:
                reply.send(503, errors.document("", 503, "The server ends. Try again.", "server_error", code="shutting_down"))
        except Exception:
            logger.exception("%s %r: internal error", request.method, request.path[:200])
            if not reply.started:
                reply.send(500, errors.document("", 500, "The server failed: its log has the cause.", "server_error", code="internal"))
        finally:
            self._finish_answer(request, reply)

    async def _wait_for_turn(self, request: Request) -> None:
        """Wait until the request may start. Probes do not wait; a long body is read on afterwards."""
        if request.path not in PROBE_PATHS:
            await self._limiter.turns.take(request.headers)
        request.has_turn = True
        if not self._reading and not request.is_complete:
            self._limiter.start_body_timeout(self)
            self.continue_body(request)

    def _finish_answer(self, request: Request, reply: Reply) -> None:
        self._serving = None
        self._last_activity = monotonic()
        if request.is_disconnected:
            return  # refused, or closed
        if not reply.can_keep_alive or not request.keep_alive or self._closing:
            self._transport.close()  # a truncated answer ends with its connection
        elif self._next is None and self._reading and self._write_paused_at is None and not self._unparsed:
            self._limiter.mark_idle(self)
        else:
            self._resume()

    def _resume(self) -> None:
        """Start the request that was read ahead, and resume reading, once the client has read enough of the previous answers."""
        if self._serving is not None or self._transport.is_closing():
            return
        if self._write_paused_at is not None:
            self._pause_reading()
            return
        request, self._next = self._next, None
        if request is not None:
            if not request.is_complete:
                self._limiter.start_body_timeout(self)
            self._last_activity = monotonic()
            self._serve(request)
        unparsed, self._unparsed = self._unparsed, b""
        if unparsed:
            self._feed(unparsed)
        if self._next is None and not self._reading:
            self._reading = True
            self._transport.resume_reading()
        if self._serving is None:
            self._limiter.mark_idle(self)

    def _pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._transport.pause_reading()

    # Called by the server

    @property
    def task(self) -> "asyncio.Task[None] | None":
        """Task of the current request."""
        return self._serving.task if self._serving is not None else None

    def finish(self) -> None:
        """Close after the current answer, or now if there is none."""
        self._closing = True
        if self._serving is None:
            self._transport.close()
        elif self._serving.reply is not None:
            self._serving.reply.close_after()

    shutdown = finish
    """The name that uvicorn calls."""

    def close_if_stalled(self, now: float) -> None:
        """Close the connection if it is idle, sends an incomplete request too slowly, or does not read its answer."""
        waits = self._serving is None or not self._serving.is_complete
        idle = waits and now - self._last_activity > KEEP_ALIVE_SECONDS
        stalled = self._write_paused_at is not None and now - self._write_paused_at > STALL_SECONDS
        if idle or stalled:
            self._transport.abort()

    def unread(self, now: float) -> tuple[int, float]:
        """Return the bytes of answers that the client has not read, and for how many seconds it has read too slowly."""
        return self._transport.get_write_buffer_size(), 0.0 if self._write_paused_at is None else now - self._write_paused_at

    def abort(self) -> None:
        """Close the connection. The unsent rest of its answer is dropped."""
        self._transport.abort()

    def on_timeout(self) -> None:
        if self._serving is not None and self._serving.is_complete:
            return  # the timeout belongs to the next request, which is not read now
        answered = self._parsing is not None and self._parsing.reply is not None and self._parsing.reply.ended
        if answered or (self._serving is None and self._parsing is None and not self._framing.overhead):
            self._transport.abort()  # it sent nothing, or was answered without its body
            return
        what = "headers" if self._parsing is None else "body"
        setting = self._limiter.setting(f"{what.rstrip('s')}_timeout")
        self._refuse(408, b"Request Timeout", f"The request's {what} took too long to come ({setting}).", "request_timeout")

    def close_idle(self) -> None:
        if self._transport.get_write_buffer_size():
            self._transport.abort()  # the client does not read its answer, so a close would never finish
        else:
            self._transport.close()

    def _refuse_head(self, what: str) -> None:
        message = f"The request's {what} {MAX_HEADER_BYTES} bytes."
        self._refuse(431, b"Request Header Fields Too Large", message, "headers_too_large")

    def _refuse(self, status: int, reason: bytes, message: str, code: str, header: bytes = b"") -> None:
        """Refuse a malformed request on the connection itself, without the application."""
        if self._parsing_stopped:
            return
        self._parsing_stopped = self._closing = True
        serving = self._serving
        if serving is not None and (serving.is_complete or (serving.reply is not None and serving.reply.started)):
            return  # its answer comes first, then the close: a refusal would be taken for that answer
        if self._parsing is not None and self._parsing.reply is not None and self._parsing.reply.ended:
            self._transport.close()  # the request has been answered
            return
        body = errors.document("", status, message, "invalid_request_error", code=code)
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n"
        if self._transport.is_closing():
            return
        self._transport.write(head % (status, reason, header, len(body)) + body)
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()  # a close on unread bytes is a reset, which overtakes the answer
        self._loop.call_later(REFUSAL_LINGER_SECONDS, self._transport.abort)
        if serving is not None:
            serving.disconnect()


def _strip_origin(request: Request) -> None:
    """Reduce an absolute target (`GET http://host/path`, RFC 9112, 3.2.2) to its path. `OPTIONS *` and similar targets have none."""
    try:
        url = httptools.parse_url(request.target)
    except httptools.HttpParserInvalidURLError:
        request.target = b"/"
        return
    request.target = (url.path or b"/") + (b"?" + url.query if url.query else b"")
