"""A multipart form, parsed with aiohttp within bounds: it bounds no preamble, and no number of parts or of lines.

A form of millions of parts or lines would stop the event loop, because aiohttp awaits nothing while it has data.
"""

import warnings
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from fairlead_common.truncate import quote, truncate
from fairlead_router.batch.requests import invalid

MAX_PARTS: Final = 16
MAX_FIELD_BYTES: Final = 4096
MAX_LINES: Final = 512
"""Lines of a whole form that belong to no part's content: boundaries, headers, what stands before the first part."""
MAX_LINE_BYTES: Final = 8190
PIECE_BYTES: Final = 256 << 10
_ENCODINGS = ("", "7bit", "8bit", "binary")
MALFORMED: Final = (
    ValueError,
    AssertionError,
    RuntimeError,
    HttpProcessingError,
    ConnectionResetError,
    aiohttp.ClientPayloadError,
    web.RequestPayloadError,
)
"""What aiohttp raises for a body that is no form, or ends early, perhaps because its client has gone."""


class _BoundedContent(aiohttp.StreamReader):
    """A request's body of which at most MAX_LINES lines are read. aiohttp's form parser uses these methods only."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content, self._lines = content, 0

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        self._lines += 1
        if self._lines > MAX_LINES:
            raise ValueError(f"it has more than {MAX_LINES} lines of boundaries and headers")
        return await self._content.readline(max_line_length=max_line_length or MAX_LINE_BYTES)

    async def read(self, n: int = -1) -> bytes:
        return await self._content.read(n)

    def at_eof(self) -> bool:
        return self._content.at_eof()

    def unread_data(self, data: bytes) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._content.unread_data(data)


async def read_parts(request: web.Request) -> AsyncIterator[aiohttp.BodyPartReader]:
    """Yield the parts of a form, each name once. Raises ApiError 400 for too many parts, or one of MALFORMED."""
    if request.content_type != "multipart/form-data":
        raise invalid(f"Content-Type is {quote(request.content_type)}; send a multipart/form-data form with the fields file and purpose.")
    names: set[str] = set()
    async for part in aiohttp.MultipartReader(request.headers, _BoundedContent(request.content)):
        if not isinstance(part, aiohttp.BodyPartReader) or len(names) >= MAX_PARTS:
            raise invalid(f"Send a form with the fields file and purpose, and at most {MAX_PARTS} fields.")
        name = part.name or ""
        if name in names:
            raise invalid(f"Field {quote(name)} comes twice: send each field once.", truncate(name, 80))
        names.add(name)
        encoding = part.headers.get(hdrs.CONTENT_TRANSFER_ENCODING, "")
        if encoding.lower() not in _ENCODINGS:
            raise invalid(f"Field {quote(name)} has Content-Transfer-Encoding {quote(encoding)}: send it without one.", truncate(name, 80))
        yield part


async def read_field(part: aiohttp.BodyPartReader) -> str:
    """Return the text of a field. Raises ApiError 400 beyond MAX_FIELD_BYTES."""
    value = bytearray()
    while piece := await part.read_chunk(MAX_FIELD_BYTES):
        value += piece
        if len(value) > MAX_FIELD_BYTES:
            raise invalid(f"Field {quote(part.name or '')} exceeds {MAX_FIELD_BYTES} bytes.", truncate(part.name or "", 80))
    return value.decode(errors="replace")


async def read_pieces(part: aiohttp.BodyPartReader) -> AsyncIterator[bytes]:
    """Yield a part's content in pieces of about PIECE_BYTES, however small the packets are in which it comes."""
    gathered = bytearray()
    while piece := await part.read_chunk(PIECE_BYTES):
        gathered += piece
        if len(gathered) >= PIECE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)
