"""HTTP/1.1 connection to a worker: bodies pass through as bytes, with backpressure.

A streamed token costs one parser call and one write, and wakes no task. Redirects and decoding are not supported.
"""

import asyncio
from time import monotonic
from typing import NamedTuple, cast

import httptools

from fairlead_common.http.response import Reply

HIGH_WATER = 32 * 1024
"""Unread bytes of a body at which reading from the worker's socket pauses. A client that never reads can hold them all."""
_READ = memoryview(bytearray(32 * 1024))
"""Shared by all connections, since each read is parsed before the next. A client that reads nothing buffers at most one more read."""
MAX_HEAD_BYTES = 64 * 1024
"""Limit of a worker's status line and headers."""


MAX_ERROR_BYTES = 64 * 1024
"""Most bytes of an error body that is converted to an event."""


class UpstreamError(Exception):
    """A request to a worker failed. The message says how."""


class ConnectFailed(UpstreamError):
    """No connection could be made, so the worker never saw the request."""


class Unreachable(ConnectFailed):
    """The worker's machine is unreachable. Unlike a refused connection, this says nothing about its process."""


class LostBeforeHead(UpstreamError):
    """The request was sent and the connection was lost before an answer: another worker may be tried."""

    was_resent = False
    """The request was sent twice: on a reused connection, then on a new one."""


class WorkerSilent(LostBeforeHead):
    """The worker no longer answers anything, so this request is not the cause."""


class ResponseTimeout(UpstreamError):
    """No byte of an answer arrived within the request's deadline. A retry would only double the wait."""


class LostAfterHead(UpstreamError):
    """The connection was lost after the answer had begun, so the client must learn of it."""


class Head(NamedTuple):
    """Worker's status line and headers (names in lower case)."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def get(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Connection(asyncio.BufferedProtocol):
    """Connection with one exchange at a time. `exchange` returns the head, then `stream_to` forwards the body or `read` returns pieces."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[Head] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._whole_head: Head | None = None
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._head_bytes = 0
        self._reply: Reply | None = None
        self._paused = False
        self._framed = False
        self._failure: UpstreamError | None = None
        self._timeout = self._head_deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._last_activity = 0.0
        self._keep_alive = True
        self.complete = True
        self.sent_at = 0.0

    # Called by the pool

    @property
    def has_head(self) -> bool:
        """Whether the answer's head has arrived."""
        return self._head is not None and self._head.done()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last byte arrived or reading resumed; since the request if none arrived."""
        return self._loop.time() - self._last_activity

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the last answer was read to its end and the worker keeps the connection open."""
        return self.complete and not self.is_closed and self._failure is None and not self._pieces and self._keep_alive

    @property
    def has_head_bytes(self) -> bool:
        """Whether a part of the answer's head has arrived."""
        return self._head_bytes > 0

    def abort(self) -> None:
        """Close without sending buffered bytes. The worker sees a reset or an end, and drops the request."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    # One exchange

    async def exchange(self, request: list[bytes], timeout: float, deadline: float) -> Head:
        """Send a request and return the answer's head. `deadline`: monotonic seconds for the head. `timeout`: longest silence in the body.

        Raises LostBeforeHead, ResponseTimeout. The connection is closed then, and also when the caller is cancelled.
        """
        if self.is_closed:
            raise LostBeforeHead("the worker had closed the connection")
        assert self._transport is not None and self.complete
        self._headers, self._pieces, self._buffered, self._head_bytes = [], [], 0, 0
        self._whole_head = None
        self.complete, self._framed, self._keep_alive = False, False, True
        self._head = self._loop.create_future()
        self._timeout = timeout
        self._last_activity = self._loop.time()
        self.sent_at = monotonic()
        self._head_deadline = self._last_activity + max(0.0, deadline - self.sent_at)
        if self._timer is None or self._timer_at > self._head_deadline:  # else the last exchange's timer serves this one
            self._stop_timer()
            self._set_timer(self._head_deadline - self._last_activity)
        self._transport.writelines(request)
        try:
            return await self._head
        except BaseException:
            self.abort()
            raise

    async def read(self) -> bytes:
        """Return all bytes of the body that have arrived; `b""` at its end. Raises LostAfterHead."""
        while not self._pieces:
            if self._failure is not None:
                raise LostAfterHead(str(self._failure))
            if self.complete:
                return b""
            self._waiter = self._loop.create_future()
            await self._waiter
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._buffered = [], 0
        self._last_activity = self._loop.time()
        self.resume()
        return piece

    async def read_error(self) -> bytes:
        """Return the rest of a small body, truncated to 64 KiB. Raises LostAfterHead."""
        body = bytearray()
        while piece := await self.read():
            if len(body) < MAX_ERROR_BYTES:
                body += piece[: MAX_ERROR_BYTES - len(body)]
        return bytes(body)

    async def stream_to(self, reply: Reply) -> None:
        """Forward the rest of the body as it arrives, and end the reply. Raises LostAfterHead."""
        self._reply, reply.source = reply, self
        try:
            if self._pieces or self.complete:
                self._forward_pieces()
            else:
                reply.flush()
            self.resume()
            if reply.is_congested:
                self.pause()
            while not self.complete:
                if self._failure is not None:
                    raise LostAfterHead(str(self._failure))
                self._waiter = self._loop.create_future()
                await self._waiter
        finally:
            self._reply = reply.source = None
            self.resume()

    def pause(self) -> None:
        """Pause reading: the client does not read."""
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._last_activity = self._loop.time()
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def fail(self, error: UpstreamError) -> None:
        """End the exchange with an error for the waiting caller."""
        if self.complete or self._failure is not None:
            return
        self._failure = error
        self._stop_timer()
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        self._wake()
        if self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio's

    def get_buffer(self, sizehint: int) -> memoryview:
        return _READ

    def buffer_updated(self, nbytes: int) -> None:
        self._last_activity = self._loop.time()
        if self.complete:
            self.abort()  # bytes without a request: the connection is out of sync
            return
        if self._head is not None and not self._head.done():
            self._head_bytes += nbytes
        try:
            self._parser.feed_data(_READ[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                self.fail(self._lost_error(f"the worker's answer is not HTTP: {error}"))
                return
            self._keep_alive = False  # bytes after the answer belong to no request
        if self._reply is not None:
            self._forward_pieces()
        elif self._head_bytes > MAX_HEAD_BYTES and self._head is not None and not self._head.done():
            self.fail(self._lost_error(f"the worker's headers exceed {MAX_HEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.has_head and not self._framed and exc is None and self._failure is None and not self.complete:
            self.on_message_complete()  # a body without a length ends with its connection
            if self._reply is not None:
                self._forward_pieces()
        self._stop_timer()
        self.fail(self._lost_error(f"the worker closed the connection ({exc or 'end of file'})"))

    # httptools

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        self._headers.append((name, value or b""))

    def on_headers_complete(self) -> None:
        assert self._head is not None
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._keep_alive = bool(self._parser.should_keep_alive())
        self._whole_head = Head(status, self._headers)
        if not any(name == b"content-length" and value.strip(b" 0") for name, value in self._headers):
            self._give_head()

    def on_body(self, body: bytes) -> None:
        self._give_head()
        self._pieces.append(body)
        if self._reply is None:
            self._buffered += len(body)
            if self._buffered > HIGH_WATER:
                self.pause()
            self._wake()

    def on_message_complete(self) -> None:
        self._give_head()
        if self._head is None or not self._head.done():
            self._headers = []  # an interim answer such as 100 Continue: the final one follows
            return
        self.complete = True
        self._wake()

    # Internals

    def _give_head(self) -> None:
        """Give the head to the caller. That of an answer with a Content-Length waits for the first byte of the body: until then, a
        lost worker has cost the client nothing, and another one can be tried."""
        if self._whole_head is not None and self._head is not None and not self._head.done():
            self._head.set_result(self._whole_head)

    def _forward_pieces(self) -> None:
        """Forward the bytes of one read in one write."""
        assert self._reply is not None
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._buffered = [], 0
        if self.complete:
            self._reply.end(piece)
        else:
            self._reply.write(piece)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lost_error(self, message: str) -> UpstreamError:
        return LostAfterHead(message) if self.has_head else LostBeforeHead(message)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, seconds: float) -> None:
        self._timer_at = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self.complete:
            return  # idle in the pool
        left = (self._last_activity + self._timeout if self.has_head else self._head_deadline) - self._loop.time()
        if left > 0 or self._paused:  # paused: the client is slow, and client_connection.py bounds that
            self._set_timer(max(left, 1.0) if self._paused else left)
            return
        if self.has_head:
            self.fail(LostAfterHead(f"no byte from the worker for {self._timeout:g} s"))
        else:
            self.fail(ResponseTimeout("no answer within the request's deadline"))
