"""Relay of another server's answer to the client, piece by piece and with backpressure."""

import asyncio
from typing import Final

import aiohttp

from fairlead_common.http.response import Reply
from fairlead_router.request.client_request import Call

PIECE_BYTES: Final = 64 << 10


class _Flow:
    """Pauses while the client does not read."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()

    async def wait(self) -> None:
        self._is_open.clear()
        await self._is_open.wait()

    def pause(self) -> None:
        self._is_open.clear()

    def resume(self) -> None:
        self._is_open.set()


async def relay_body(call: Call, reply: Reply, response: aiohttp.ClientResponse) -> None:
    """Write the body of `response` to the client as it arrives. The caller has started the reply, and ends it."""
    flow = _Flow()
    reply.flush()
    reply.source = flow
    try:
        async for piece in response.content.iter_any():
            for start in range(0, len(piece), PIECE_BYTES):
                if reply.is_congested:
                    await flow.wait()
                reply.write(piece[start : start + PIECE_BYTES])
            call.outcome.bytes_out += len(piece)
    finally:
        reply.source = None
