"""The body of a request to the agent: bounded in bytes, also after decompression, and in the time that it may take to arrive."""

import asyncio
import zlib
from typing import Final

from aiohttp import web

from fairlead_agent.proxy.body import Refused
from fairlead_agent.proxy.body_budget import HeldBody

_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's `wbits` by Content-Encoding (RFC 9110, 8.4.1)."""
ARRIVAL_SECONDS: Final = 60.0
"""That a body may take to arrive."""
STEP_BYTES: Final = 1 << 20
"""Bytes that are decompressed before the budget counts them."""


async def read_body(request: web.Request, limit: int, held: HeldBody) -> bytes:
    """Return the body, decompressed.

    Raises Refused: 413 for more than `limit` bytes before or after decompression, 400, 415, 408 and 429 as `held` does.
    The application must not decompress by itself: aiohttp checks the size after the fact, so 400 KB of gzip took 219 MiB.
    """
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding in ("", "identity"):
        return await _receive(request, limit, held)
    if coding not in _WINDOWS:
        raise Refused(415, f"Content-Encoding: {coding[:100]!r} is not supported; send the body without one, or as gzip")
    return await _decompress(await _receive(request, limit, held), _WINDOWS[coding], limit, held)


async def _receive(request: web.Request, limit: int, held: HeldBody) -> bytes:
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    body = bytearray()
    if request.body_exists:
        async with held.arriving(ARRIVAL_SECONDS):
            while piece := await request.content.readany():
                body += piece
                if len(body) > limit:
                    raise _too_large(limit)
                held.resize(len(body))
    return bytes(body)


async def _decompress(rest: bytes, window: int, limit: int, held: HeldBody) -> bytes:
    decompressor, found = zlib.decompressobj(window), bytearray()
    try:
        while not decompressor.eof:
            piece = await asyncio.to_thread(decompressor.decompress, rest, STEP_BYTES)
            found += piece
            rest = decompressor.unconsumed_tail
            if len(found) > limit:
                raise _too_large(limit)
            held.resize(len(rest) + len(found))
            if not piece and not rest:
                break
    except zlib.error as error:
        raise Refused(400, f"Content-Encoding: the body is not compressed as it says ({error})") from None
    if not decompressor.eof or decompressor.unused_data:
        raise Refused(400, "Content-Encoding: the compressed body is cut off, or something follows it")
    return bytes(found)


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body has more than {limit} bytes (--max-body-bytes): send a shorter one")
