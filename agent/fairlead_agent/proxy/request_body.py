"""The body of a request to the agent: bounded, also after decompression."""

import asyncio
import zlib
from typing import Final

from aiohttp import web

from fairlead_agent.proxy.body import Refused

_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's `wbits` by Content-Encoding (RFC 9110, 8.4.1)."""


async def read_body(request: web.Request, limit: int) -> bytes:
    """Return the body, decompressed. Raises Refused: 413 for more than `limit` bytes before or after that, 400, 415.

    The application must not decompress by itself: aiohttp checks the size after the fact, so 400 KB of gzip took 219 MiB.
    """
    try:
        data = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(limit) from None
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding in ("", "identity"):
        return data
    if coding not in _WINDOWS:
        raise Refused(415, f"Content-Encoding: {coding[:100]!r} is not supported; send the body without one, or as gzip")
    return await asyncio.to_thread(_decompress, data, _WINDOWS[coding], limit)


def _decompress(data: bytes, window: int, limit: int) -> bytes:
    decompressor = zlib.decompressobj(window)
    try:
        found = decompressor.decompress(data, limit + 1)
    except zlib.error as error:
        raise Refused(400, f"Content-Encoding: the body is not compressed as it says ({error})") from None
    if len(found) > limit:
        raise _too_large(limit)
    if not decompressor.eof or decompressor.unused_data:
        raise Refused(400, "Content-Encoding: the compressed body is cut off, or something follows it")
    return found


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body has more than {limit} bytes (--max-body-bytes): send a shorter one")
