"""An answer on its way to a client: head, body framed as the client's HTTP version allows, backpressure.

Written to the transport without a task or a queue between: what a worker sends is with the client's kernel in the same turn of the loop.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from fairlead_router.errors import Headers

_STATUS_LINES = {int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_BODILESS = frozenset((204, 304))


class Source(Protocol):
    """Where a body comes from; told when the client cannot take more for now, and when it can again."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Reply:
    """`start`, `write` as often as needed, `end`. After the client has gone, all of them do nothing."""

    def __init__(self, transport: asyncio.Transport, method: str, keep_alive: bool, old: bool) -> None:
        """`old`: the client speaks HTTP/1.0."""
        self._transport, self._keep_alive, self._is_http10 = transport, keep_alive, old
        self._omits_body = method == "HEAD"
        self._chunked = False
        self._head = b""
        self.is_congested = False
        """The client has not taken what was written; what comes now is held in memory."""
        self.started = self.ended = False
        self.source: Source | None = None
        self.last_piece = b""
        """The body's newest piece."""
        self.sent = 0
        """Bytes of the body so far."""
        self.observer: Callable[[bytes], None] | None = None
        """Reads over our shoulder, where somebody counts what an answer used."""

    @property
    def can_keep_alive(self) -> bool:
        """Another answer may follow on the connection."""
        return self._keep_alive and self.ended

    def start(self, status: int, headers: Headers) -> None:
        """The status line and headers; they leave with the first piece of the body, or at `flush`. Framing and `connection` are ours."""
        self.started = True
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        sized = False
        for name, value in headers:
            if name == b"content-length":
                sized = True
            elif name == b"connection":
                self._keep_alive = self._keep_alive and value.lower() != b"close"
                continue
            lines += (name, b": ", value, b"\r\n")
        self._omits_body = self._omits_body or status in _BODILESS
        if not sized and not self._omits_body:
            if self._is_http10:
                self._keep_alive = False  # its end is the connection's
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
        """Send the head although nothing of the body is there."""
        if self._head:
            self._send(self._head)
            self._head = b""

    def write(self, data: bytes) -> None:
        """A piece of the body."""
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
        elif self._head:
            data = self._head + data
        self._head = b""
        self._send(data)

    def end(self, data: bytes = b"") -> None:
        """The last piece, and the end of the answer."""
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
        if not self._transport.is_closing():  # uvloop's raises once it is closed
            self._transport.write(data)

    # What the connection tells

    def close_after(self) -> None:
        """No other answer will follow."""
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
        """One whole, small answer."""
        self.start(status, [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or [])])
        self.end(body)
