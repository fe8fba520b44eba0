"""Answers of every API: one JSON document, or server-sent events. Nothing is sent before the first token is there."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.choice import OutputDelta
from fairlead_worker.api.generation.prepare import GenerationRequest
from fairlead_worker.api.generation.run import GenerationRun
from fairlead_worker.api.http import ClientGone, RequestContext, to_api_error
from fairlead_worker.api.worker import Worker

logger = logging.getLogger(__name__)

CACHED_HEADER, USAGE_HEADER = "x-fairlead-cached-tokens", "x-fairlead-usage"


class ResponseWriter(Protocol):
    """One API's words for one answer. Of a stream `begin`, `add` as often as needed, and `end` or `fail`; else `keep` and `whole`."""

    def collect(self, batch: list[tuple[int, OutputDelta]]) -> None:
        """Take in (choice, piece), to show them at the end."""

    def document(self) -> dict[str, Any]:
        """The document of all that was kept."""

    def begin(self) -> bytes:
        """What a stream begins with."""

    def add(self, batch: list[tuple[int, OutputDelta]]) -> bytes:
        """The events of (choice, piece). Their choices have taken in all of the batch."""

    def end(self, comment: bytes) -> bytes:
        """The last events, and among the very last bytes `comment`, which is for the router."""

    def fail(self, error: ApiError) -> bytes:
        """What a stream that broke ends with."""


async def send_answer(
    context: RequestContext,
    worker: Worker,
    generation_request: GenerationRequest,
    writer: ResponseWriter,
    *,
    stream: bool,
    usage_comment: bool,
) -> None:
    """Generate and send. A client that goes takes its sequences with it. `usage_comment`: of a stream, the router wants to know it."""
    run = GenerationRun(worker, generation_request)

    async def work() -> None:
        worker.check_queue_limit(len(generation_request.submissions))
        async with worker.engine.generate(generation_request.submissions) as generation:
            deltas = run.deltas(generation)
            if stream:
                await _send_stream(context, generation_request, writer, deltas, usage_comment)
            else:
                await _send_document(context, generation_request, writer, deltas)

    try:
        await context.while_connected(work())
    except ClientGone:
        run.record_disconnect()
        raise
    finally:
        run.log_summary(context.request_id)


async def _send_document(
    context: RequestContext,
    generation_request: GenerationRequest,
    writer: ResponseWriter,
    deltas: AsyncIterator[list[tuple[int, OutputDelta]]],
) -> None:
    async for batch in deltas:
        writer.collect(batch)
    # Twenty entries for each token of a long prompt take seconds: not in the way of everybody's streams.
    document = await asyncio.to_thread(writer.document) if generation_request.needs_prompt_logprobs else writer.document()
    await context.respond_json(
        document, {CACHED_HEADER: str(_cached_tokens(generation_request)), USAGE_HEADER: _usage_header(generation_request)}
    )


async def _send_stream(
    context: RequestContext,
    generation_request: GenerationRequest,
    writer: ResponseWriter,
    deltas: AsyncIterator[list[tuple[int, OutputDelta]]],
    usage_comment: bool,
) -> None:
    try:
        async for batch in deltas:
            before = b""
            if not context.response_started:
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                await context.start_response(200, headers | {CACHED_HEADER: str(_cached_tokens(generation_request))})
                before = writer.begin()
            if data := before + writer.add(batch):
                await context.write(data)
    except Exception as error:
        if not context.response_started:
            raise
        logger.warning("request %s ended in mid-stream: %s", context.request_id, error)
        await context.write(writer.fail(to_api_error(error)), more=False)
        return
    comment = f": usage {_usage_header(generation_request)}\n\n".encode() if usage_comment else b""
    await context.write(writer.end(comment), more=False)


def _cached_tokens(generation_request: GenerationRequest) -> int:
    cached: int = generation_request.usage()["prompt_tokens_details"]["cached_tokens"]
    return cached


def _usage_header(generation_request: GenerationRequest) -> str:
    """Prompt tokens and generated ones."""
    usage = generation_request.usage()
    return f"{usage['prompt_tokens']} {usage['completion_tokens']}"
