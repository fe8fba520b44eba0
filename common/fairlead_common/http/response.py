"""Reply to a client: head, body framed by the client's HTTP version, and backpressure.

Bytes go to the transport without a task or queue in between, so a worker's bytes reach the client's kernel in the same loop iteration.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from fairlead_common.http.framing import WRITE_HIGH_WATER

Headers = list[tuple[bytes, bytes]]
_STATUS_LINES = {int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_BODILESS = frozenset((204, 304))


class Source(Protocol):
    """Source of a body, paused while the client's buffer is full."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Reply:
    """Reply with `start`, any number of `write`, and `end`. After a disconnect these do nothing."""

    def __init__(self, transport: asyncio.Transport, method: str, keep_alive: bool, old: bool) -> None:
        """`old`: the client uses HTTP/1.0."""
        self._transport, self._keep_alive, self._is_http10 = transport, keep_alive, old
        self._omits_body = method == "HEAD"
        self._chunked = False
        self._head = b""
        self.is_congested = False
        """The client has not read what was written, and further bytes are buffered in memory."""
        self.started = self.ended = False
        self.source: Source | None = None
        self.last_piece = b""
        """Latest piece of the body."""
        self.sent = 0
        """Sent bytes of the body."""
        self.observer: Callable[[bytes], None] | None = None
        """Optional observer of the body, which counts token usage."""
        self.extra_headers: Headers = []
        """Headers that `start` adds."""

    @property
    def can_keep_alive(self) -> bool:
        """Whether another answer may follow on the connection."""
        return self._keep_alive and self.ended

    def start(self, status: int, headers: Headers) -> None:
        """Set status and headers. They are sent with the first piece of the body, or by `flush`. Framing and `connection` are set here."""
        self.started = True
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        sized = False
        for name, value in [*headers, *self.extra_headers] if self.extra_headers else headers:
            if name == b"content-length":
                sized = True
            elif name == b"connection":
                self._keep_alive = self._keep_alive and value.lower() != b"close"
                continue
            lines += (name, b": ", value, b"\r\n")
        self._omits_body = self._omits_body or status in _BODILESS
        if not sized and not self._omits_body:
            if self._is_http10:
                self._keep_alive = False  # the end of the connection ends the body
            else:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self._keep_alive:
            lines.append(b"connection: close\r\n")
        elif self._is_http10:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def flush(self) -> None:
        """Send the head without waiting for the body."""
        if self._head:
            self._send(self._head)
            self._head = b""

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if not data:
            return
        self.last_piece = data
        self.sent += len(data)
        if self.observer is not None:
            self.observer(data)
        if self._omits_body:
            return
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        elif len(data) > WRITE_HIGH_WATER:  # a document that many clients get is not copied for each
            self.flush()
        else:
            data = self._head + data
        self._head = b""
        self._send(data)

    def end(self, data: bytes = b"") -> None:
        """Send the last piece and end the reply."""
        self.ended = True
        if not self._chunked:
            self.write(data)
            self.flush()
            return
        self.last_piece = data or self.last_piece
        self.sent += len(data)
        if self.observer is not None:
            self.observer(data)
        framed = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        self._send(b"%b%b0\r\n\r\n" % (self._head, framed))
        self._head = b""

    def _send(self, data: bytes) -> None:
        if not self._transport.is_closing():  # uvloop's transport raises once it is closed
            self._transport.write(data)

    # Called by the connection

    def close_after(self) -> None:
        """Close the connection after this reply."""
        self._keep_alive = False

    def pause(self) -> None:
        self.is_congested = True
        if self.source is not None:
            self.source.pause()

    def resume(self) -> None:
        self.is_congested = False
        if self.source is not None:
            self.source.resume()

    def send(self, status: int, body: bytes, headers: Headers | None = None, content_type: bytes = b"application/json") -> None:
        """Send a complete, small reply."""
        self.start(status, [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or [])])
        self.end(body)
