"""Cut a client's bytes at message boundaries before the parser sees them, and count the bytes that are not body.

httptools has no pause: it parses all requests in a buffer at once, and it joins a header's or trailer's pieces in quadratic time.
Both servers therefore feed it one message at a time, and bound what it may hold.
"""

import socket
from typing import Final

READ_BYTES: Final = 16 * 1024
"""Largest read outside a body of known length: the most that stays unparsed behind a pipelined request."""
BODY_READ_BYTES: Final = 256 * 1024
WRITE_HIGH_WATER: Final = 16 * 1024
"""Response bytes that may wait for a slow client. Above it, the client's next request waits and the response's source is paused."""
REFUSAL_LINGER_SECONDS: Final = 1.0
"""How long a refused client's bytes are read and dropped, so that it can read the error."""
UPGRADE_WITH_BODY: Final = "A request with Upgrade or CONNECT cannot have a body here."
"""httptools ends such a request after its head, so its body would be read as the next request."""
FRAGMENT: Final = "A request target has no fragment: leave out '#' and what follows, or write %23."
"""RFC 9112, 3.2. Some parsers cut the fragment off and others do not, so they would see different paths."""
KERNEL_UNSENT: Final = 64 * 1024
"""Unsent response bytes in the kernel's buffer. Without the bound the kernel takes up to 4 MiB for a client that never reads."""
_BUFFER: Final = bytearray(BODY_READ_BYTES)
"""Shared by all connections: each read is consumed before the event loop starts the next one."""
_VIEW: Final = memoryview(_BUFFER)
_HEAD_VIEW: Final = _VIEW[:READ_BYTES]
_END: Final = b"\r\n\r\n"


class Framing:
    """Position of one connection in its stream of messages.

    Heads and chunked bodies can end only after an empty line. So a piece that stops there contains at most one message end, at its own end.
    """

    __slots__ = ("_tail", "body_left", "overhead")

    def __init__(self) -> None:
        self.body_left = 0
        """Bytes of a body with a Content-Length that the parser has not got yet."""
        self.overhead = 0
        """Bytes of a head. In a chunked body: bytes of chunk headers and trailers minus bytes of body, at least 0."""
        self._tail = b""

    def buffer(self) -> memoryview:
        """Return the buffer for the next read. It never extends beyond the end of a body of known length."""
        return _VIEW[: min(self.body_left, BODY_READ_BYTES)] if self.body_left else _HEAD_VIEW

    def last_read(self, size: int) -> bytes | memoryview:
        """Return the last `size` bytes that were read. A view is valid only until the next read."""
        return _VIEW[:size] if self.body_left else bytes(_VIEW[:size])

    def cut(self, data: bytes | memoryview, start: int) -> int:
        """Return the end of the piece of `data` that begins at `start`, and count the piece as given to the parser."""
        if self.body_left:
            end = min(len(data), start + self.body_left)
            self.body_left -= end - start
            return end
        assert isinstance(data, bytes), "only a body of known length is read as a view"
        end = self._end_of(data, start)
        self.overhead += end - start
        return end

    def reset(self, length: int = 0) -> None:
        """Start a body after its head is parsed, or a head after a message. `length`: the Content-Length; 0 for a head, and for a body
        that is chunked or has no length."""
        self.body_left, self.overhead, self._tail = length, 0, b""

    def count_body(self, size: int) -> None:
        """Subtract `size` parsed body bytes from the overhead twice: once because they were counted, once as an allowance for overhead.

        The limited allowance refuses a body in chunks of one byte. It would cost the event loop a microsecond a byte, endlessly.
        """
        self.overhead = max(0, self.overhead - 2 * size)

    def _end_of(self, data: bytes, start: int) -> int:
        tail, self._tail = self._tail, b""
        if tail and (at := (tail + data[start : start + 3]).find(_END)) >= 0:  # the empty line began in the last piece
            return start + at + len(_END) - len(tail)
        at = data.find(_END, start)
        if at >= 0:
            return at + len(_END)
        self._tail = (tail + data[max(start, len(data) - 3) :])[-3:]
        return len(data)


def body_headers(headers: list[tuple[bytes, bytes]]) -> tuple[int, list[bytes]]:
    """Return the Content-Length of parsed headers (0 if there is none) and the values of Transfer-Encoding. Names are in lower case.

    The parser has checked that the length has digits only and occurs at most once.
    """
    length, codings = 0, []
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            codings.append(value)
    return length, codings


def bound_unsent(listener: socket.socket) -> None:
    """Bound the kernel's unsent bytes for a client that does not read. Bytes in flight are not bounded. Accepted connections inherit it."""
    if listener.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, KERNEL_UNSENT)
