"""Answers of every API: one JSON document, or server-sent events. Nothing is sent before the first token is there."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.choice import Piece
from fairlead_worker.api.generation.prepare import Prepared
from fairlead_worker.api.generation.run import Run
from fairlead_worker.api.http import ClientGone, Exchange, as_api_error
from fairlead_worker.api.worker import Worker

logger = logging.getLogger(__name__)

CACHED_HEADER, USAGE_HEADER = "x-fairlead-cached-tokens", "x-fairlead-usage"


class Writer(Protocol):
    """One API's words for one answer. Of a stream `begin`, `add` as often as needed, and `end` or `fail`; else `keep` and `whole`."""

    def keep(self, batch: list[tuple[int, Piece]]) -> None:
        """Take in (choice, piece), to show them at the end."""

    def whole(self) -> dict[str, Any]:
        """The document of all that was kept."""

    def begin(self) -> bytes:
        """What a stream begins with."""

    def add(self, batch: list[tuple[int, Piece]]) -> bytes:
        """The events of (choice, piece). Their choices have taken in all of the batch."""

    def end(self, comment: bytes) -> bytes:
        """The last events, and among the very last bytes `comment`, which is for the router."""

    def fail(self, error: ApiError) -> bytes:
        """What a stream that broke ends with."""


async def answer(exchange: Exchange, worker: Worker, prepared: Prepared, writer: Writer, *, stream: bool, usage_comment: bool) -> None:
    """Generate and send. A client that goes takes its sequences with it. `usage_comment`: of a stream, the router wants to know it."""
    run = Run(worker, prepared)

    async def work() -> None:
        worker.make_way(len(prepared.submissions))
        async with worker.engine.generate(prepared.submissions) as generation:
            pieces = run.pieces(generation)
            if stream:
                await _stream(exchange, prepared, writer, pieces, usage_comment)
            else:
                await _whole(exchange, prepared, writer, pieces)

    try:
        await exchange.while_connected(work())
    except ClientGone:
        run.gone()
        raise
    finally:
        run.log(exchange.request_id)


async def _whole(exchange: Exchange, prepared: Prepared, writer: Writer, pieces: AsyncIterator[list[tuple[int, Piece]]]) -> None:
    async for batch in pieces:
        writer.keep(batch)
    # Twenty entries for each token of a long prompt take seconds: not in the way of everybody's streams.
    document = await asyncio.to_thread(writer.whole) if prepared.scored else writer.whole()
    await exchange.json(document, {CACHED_HEADER: str(_cached(prepared)), USAGE_HEADER: _spent(prepared)})


async def _stream(
    exchange: Exchange, prepared: Prepared, writer: Writer, pieces: AsyncIterator[list[tuple[int, Piece]]], usage_comment: bool
) -> None:
    try:
        async for batch in pieces:
            before = b""
            if not exchange.started:
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                await exchange.start(200, headers | {CACHED_HEADER: str(_cached(prepared))})
                before = writer.begin()
            if data := before + writer.add(batch):
                await exchange.write(data)
    except Exception as error:
        if not exchange.started:
            raise
        logger.warning("request %s ended in mid-stream: %s", exchange.request_id, error)
        await exchange.write(writer.fail(as_api_error(error)), more=False)
        return
    comment = f": usage {_spent(prepared)}\n\n".encode() if usage_comment else b""
    await exchange.write(writer.end(comment), more=False)


def _cached(prepared: Prepared) -> int:
    cached: int = prepared.usage()["prompt_tokens_details"]["cached_tokens"]
    return cached


def _spent(prepared: Prepared) -> str:
    """Prompt tokens and generated ones."""
    usage = prepared.usage()
    return f"{usage['prompt_tokens']} {usage['completion_tokens']}"
