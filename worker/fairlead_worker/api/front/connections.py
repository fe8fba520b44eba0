"""Limits for uvicorn's connections: their number, header and trailer bytes, requests read ahead, unsent responses, and times.

uvicorn limits none of these: a client could open a thousand connections, send nothing, and hold each of them forever.
"""

import asyncio
from functools import partial
from time import monotonic
from typing import Any
from urllib.parse import unquote

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fairlead_common.http.connection_limiter import ConnectionLimiter, Limits
from fairlead_common.http.framing import FRAGMENT, REFUSAL_LINGER_SECONDS, UPGRADE_WITH_BODY, WRITE_HIGH_WATER, Framing, body_headers
from fairlead_common.http.head import find_fault
from fairlead_worker.api.errors import ApiError

CHECK_INTERVAL_SECONDS = 1.0
STALL_SECONDS = 600.0
"""Seconds after which a client that reads nothing of its response counts as disconnected."""
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}


class Connections:
    """All connections of a port. `protocol` is the protocol factory for uvicorn."""

    def __init__(self, limits: Limits) -> None:
        self.limiter: ConnectionLimiter[Connection] = ConnectionLimiter(limits)
        self.protocol = partial(_BufferedReader, self.limiter)

    async def monitor(self) -> None:
        """Until cancelled, end connections that exceed a timeout or do not read their response."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)
            now = monotonic()
            self.limiter.close_overdue(now)
            for connection in self.limiter:
                connection.check_stall(now)


class _BufferedReader(asyncio.BufferedProtocol):
    """Bounds the size of reads: an event loop calls `get_buffer` only for protocols that are not `asyncio.Protocol`."""

    def __init__(self, limiter: "ConnectionLimiter[Connection]", *args: Any, **kwargs: Any) -> None:
        self._connection = Connection(limiter, *args, **kwargs)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.connection_made(transport)  # type: ignore[arg-type]  # uvloop's transport does not inherit from asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.buffer_updated(nbytes)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class _FlowControl(FlowControl):
    """uvicorn's flow control. While a request is read ahead, an application that waits for a disconnect cannot resume reading."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """One client connection.

    At most one request is read ahead. It starts only when the responses before it are below the high-water mark.
    """

    def __init__(self, limiter: "ConnectionLimiter[Connection]", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deadline = 0.0
        self._limiter = limiter
        self._framing = Framing()
        self._unparsed = b""
        """The rest of the read that contained the waiting request. Reading pauses until that request starts."""
        self._has_waiting_request = False
        """True if uvicorn has a request to start once the client has read more of the previous response."""
        self._current_cycle: Any = None
        """uvicorn's cycle of the request whose response precedes that of the request in `pipeline`."""
        self._trailers = 0
        self._in_body = False
        self._finished = False
        """True after a refusal or the last request: nothing more is read."""
        self._is_last_request = False
        self._stalled_since: float | None = None
        """Monotonic time since which the client does not read its response."""

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.flow = self._flow = _FlowControl(transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        if not self._limiter.add(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.remove(self)
        self._unparsed = b""
        self.pipeline.clear()
        super().connection_lost(exc)

    def get_buffer(self) -> memoryview:
        return self._framing.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if not self._finished:
            self._feed(self._framing.last_read(nbytes))

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse up to the head of the first request that has to wait. Keep the rest unparsed."""
        start = 0
        while start < len(data) and not self._finished and not self.pipeline:
            end = self._framing.cut(data, start)
            if not self._in_body and self._framing.overhead > self._limiter.max_header_bytes:
                self._refuse_head("headers exceed")
                return
            super().data_received(data[start:end])  # type: ignore[arg-type]  # the parser accepts any buffer
            if self._in_body and self._framing.overhead > self._limiter.max_header_bytes:
                self._refuse_head("chunk headers and trailers exceed")
            start = end
        if self.pipeline and not self._finished:
            self._unparsed = bytes(data[start:])
            self._hold()

    def _hold(self) -> None:
        self._flow.held = True
        self.flow.pause_reading()

    def _resume_reading(self) -> None:
        """Resume reading, unless a request waits or the client has to read the previous response first."""
        if self.transport.is_closing():
            return
        self._flow.held = False
        unparsed, self._unparsed = self._unparsed, b""
        if unparsed:
            self._feed(unparsed)
        self.flow.resume_reading()

    def pause_writing(self) -> None:
        self._stalled_since = monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_since = None
        super().resume_writing()
        if self._has_waiting_request:
            self._limiter.schedule(self._resume)

    # httptools

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._limiter.start_head_timeout(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            super().on_header(name, value)
            return
        self._trailers += 1  # trailers are dropped: they must not set headers
        if self._trailers == self._limiter.max_headers + 1:
            self._refuse(431, f"the request has more than {self._limiter.max_headers} trailers (--limits max_headers)", "headers_too_large")

    def on_headers_complete(self) -> None:
        if self._finished:
            return  # the connection was refused already
        if len(self.headers) > self._limiter.max_headers:
            message = f"the request has {len(self.headers)} headers, more than {self._limiter.max_headers} (--limits max_headers)"
            self._refuse(431, message, "headers_too_large")
            return
        if fault := find_fault(self.parser.get_http_version(), self.headers):
            self._refuse(400, fault, "bad_request")
            return
        length, codings = body_headers(self.headers)
        if any(coding.strip().lower() != b"chunked" for coding in codings):
            self._refuse(400, "Transfer-Encoding: only chunked is supported", "bad_request")
            return
        if b"#" in self.url:
            self._refuse(400, FRAGMENT, "bad_request")
            return
        path, mark, query = self.url.partition(b"?")
        if path.endswith(b"/") and path != b"/" and not path.endswith(b"//"):  # some clients join a base URL and a path so
            path = path[:-1]
            self.url = path + mark + query
        if self._limiter.is_full_for(unquote(path.decode("latin-1"))):
            message = f"this worker has the maximum number of connections ({self._limiter.max_connections}, --limits max_connections)"
            self._refuse(503, message, "too_many_connections")
            return
        upgrade = self.parser.should_upgrade()
        if upgrade and (length or codings):
            self._refuse(400, UPGRADE_WITH_BODY, "bad_request")
            return
        self._in_body, self._trailers = True, 0
        self._framing.begin_body(length)
        self._limiter.start_body_timeout(self)
        before = self.cycle
        super().on_headers_complete()
        if upgrade:
            self._is_last_request, self.cycle.keep_alive = True, False  # no protocol upgrade is supported: answer, then close
        if self.pipeline:
            self._current_cycle = before
            self._limiter.clear_deadline(self)  # the previous request is not answered yet, and reading pauses until it is

    def on_body(self, body: bytes) -> None:
        self._framing.count_body(len(body))
        if not self._finished:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._framing.end_message()
        self._limiter.clear_deadline(self)
        if not self._finished:
            super().on_message_complete()
            if self.cycle.response_complete:  # the response ended before the body
                self._limiter.mark_idle(self)
            self._finished = self._is_last_request

    def on_response_complete(self) -> None:
        if self.transport.is_closing() or (self._stalled_since is None and not self.pipeline):
            self._finish_response()
            return
        self._has_waiting_request = True  # the next request starts in turn, once the client has read enough of this response
        self._hold()
        if self._stalled_since is None:
            self._limiter.schedule(self._resume)

    def _resume(self) -> None:
        if self._has_waiting_request and self._stalled_since is None:
            self._has_waiting_request = False
            self._finish_response()

    def _finish_response(self) -> None:
        super().on_response_complete()
        if self._in_body:
            self._limiter.start_body_timeout(self)
        elif self._framing.overhead:
            self._limiter.start_head_timeout(self)
        elif self.cycle.response_complete:
            self._limiter.mark_idle(self)
        self._resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP. uvicorn would answer in plain text."""
        self._refuse(400, msg, "bad_request")

    # Callbacks of the ConnectionLimiter

    def on_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete and not self._in_body:
            return  # the next request is read only after this one is answered
        if not self._in_body and not self._framing.overhead:
            self.transport.abort()  # it sent nothing
            return
        what, setting = ("body", "body_timeout") if self._in_body else ("headers", "header_timeout")
        self._refuse(408, f"the request's {what} took too long to arrive (--limits {setting})", "request_timeout")

    def close_idle(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client reads nothing, so a close would never finish
        else:
            self.transport.close()

    def check_stall(self, now: float) -> None:
        if self._stalled_since is None and self.transport.is_closing():
            self._stalled_since = now  # the rest of the response is below the high-water mark
        if self._stalled_since is not None and now - self._stalled_since > STALL_SECONDS:
            self.transport.abort()

    def _refuse_head(self, what: str) -> None:
        message = f"the request's {what} {self._limiter.max_header_bytes} bytes (--limits max_header_bytes)"
        self._refuse(431, message, "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer something that is not a valid request. No endpoint sees it."""
        if self._finished:
            return
        self._finished = True
        if self.pipeline:
            self.pipeline.clear()
            self._current_cycle.keep_alive = False  # its response comes first, then the close: the client would take ours for it
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (cycle.response_started or not self._in_body):
            if cycle.response_started and self._in_body:
                self.transport.close()  # it was answered without its body, so the rest of the body is not awaited
            else:
                cycle.keep_alive = False  # its response comes first, then the close: the client would take ours for it
            return
        body = ApiError(status, message, code=code).body()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n"
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        if self.transport.is_closing():
            return
        self.transport.write(head % (status, _REASONS[status], retry, len(body)) + body)
        self.transport.write_eof()  # a close on unread bytes is a TCP reset, which overtakes the response
        self.loop.call_later(REFUSAL_LINGER_SECONDS, self.transport.abort)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
