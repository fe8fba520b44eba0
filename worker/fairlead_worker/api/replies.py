"""Responses of every API: one JSON document, or server-sent events. No byte is sent before the first token."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from time import thread_time
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from fairlead_common.protocols.answer import Answer
from fairlead_worker.api.answers.completions import Usage
from fairlead_worker.api.engine.generation import Generation
from fairlead_worker.api.engine.spans import MAX_TRACED
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.choice import OutputDelta
from fairlead_worker.api.generation.prepare import GenerationRequest
from fairlead_worker.api.generation.run import GenerationRun
from fairlead_worker.api.http import ClientGone, RequestContext, to_api_error
from fairlead_worker.api.request_cpu import SECONDS_A_TOKEN, excess
from fairlead_worker.api.router_headers import USAGE
from fairlead_worker.api.worker import Worker
from fairlead_worker.ipc.messages import Output

logger = logging.getLogger(__name__)

CACHED_HEADER, USAGE_HEADER = "x-fairlead-cached-tokens", "x-fairlead-usage"


class ResponseWriter(Protocol):
    """Serializes one response for one API.

    A stream calls `begin`, `add` for each batch, and `end` or `fail`. A whole response calls `collect` and `document`.
    """

    def collect(self, batch: list[tuple[int, OutputDelta]]) -> None:
        """Store a batch of (choice, delta) for `document`."""

    def document(self) -> Answer:
        """Return the answer from everything that was collected."""

    def begin(self) -> bytes:
        """Return the first bytes of a stream."""

    def add(self, batch: list[tuple[int, OutputDelta]]) -> bytes:
        """Return the events of a batch of (choice, delta). The choices have already processed the whole batch."""

    def end(self, comment: bytes) -> bytes:
        """Return the last events of a stream. `comment` is for the router and is part of the last bytes."""

    def fail(self, error: ApiError) -> bytes:
        """Return the last bytes of a stream that failed."""


async def send_answer(
    context: RequestContext,
    worker: Worker,
    generation_request: GenerationRequest,
    writer: ResponseWriter,
    *,
    stream: bool,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Generate and send the response. Abort its sequences if the client disconnects.

    `before_end`: awaited when all tokens are there, before the end of the answer.
    """
    run = GenerationRun(worker, generation_request, context.span, context.cpu)

    def report(index: int, output: Output) -> None:
        """Charge a sequence that was aborted. Once an answer has begun, its tokens are in the usage."""
        run.add_masks(index, output)
        if not context.response_started:
            context.cpu.add_computed(output.computed_tokens)

    async def work() -> None:
        worker.check_queue_limit(len(generation_request.submits), generation_request.submits[0].tenant)
        traced = MAX_TRACED if context.span.is_recording else 0
        async with Generation(worker.engine, generation_request.submits, traced, report) as generation:
            deltas = run.deltas(generation) if before_end is None else _followed_by(run.deltas(generation), before_end)
            if stream:
                await _send_stream(context, generation_request, writer, deltas)
            else:
                await _send_document(context, worker, generation_request, writer, deltas)

    try:
        await context.while_connected(work())
    except ClientGone:
        if not context.response_started:
            context.cpu.add_computed(generation_request.count_finished_tokens())
        run.record_disconnect()
        raise
    finally:
        run.log_summary(context.request_id)


async def _followed_by(
    deltas: AsyncIterator[list[tuple[int, OutputDelta]]], work: Callable[[], Awaitable[None]]
) -> AsyncIterator[list[tuple[int, OutputDelta]]]:
    async for batch in deltas:
        yield batch
    await work()


async def _send_document(
    context: RequestContext,
    worker: Worker,
    generation_request: GenerationRequest,
    writer: ResponseWriter,
    deltas: AsyncIterator[list[tuple[int, OutputDelta]]],
) -> None:
    async for batch in deltas:
        writer.collect(batch)
    # Twenty entries for each token of a long prompt or of many choices take seconds. A thread keeps the other streams running meanwhile.
    if generation_request.has_logprobs:

        def format() -> bytes:
            began = thread_time()
            document = msgspec.json.encode(_encode_parts(writer.document()))
            loop.call_soon_threadsafe(context.cpu.add_covered, thread_time() - began)
            return document

        def start(slot: int) -> asyncio.Future[bytes]:
            return asyncio.ensure_future(asyncio.to_thread(format))

        loop = asyncio.get_running_loop()
        data = await worker.large_answers.run(generation_request.submits[0].tenant, start)
    else:
        data = msgspec.json.encode(writer.document())
    usage = generation_request.usage()
    headers = {CACHED_HEADER: str(generation_request.count_cached().shown), USAGE_HEADER: _usage_header(usage)}
    context.cpu.tokens = usage.total_tokens
    await context.respond(200, data, headers)


def _encode_parts(value: Any, depth: int = 4) -> Any:
    """Encode the objects in lists one by one, because msgspec holds the interpreter's lock until all is encoded."""
    if depth and isinstance(value, Answer):
        tag = value.__struct_config__
        head = {tag.tag_field: tag.tag} if tag.tag_field else {}
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return head | {name: _encode_parts(each, depth - 1) for name, each in fields if each is not UNSET}
    if depth and isinstance(value, list) and value and isinstance(value[-1], Answer | dict):
        return [msgspec.Raw(msgspec.json.encode(_encode_parts(each, depth - 1))) for each in value]
    return value


async def _send_stream(
    context: RequestContext,
    generation_request: GenerationRequest,
    writer: ResponseWriter,
    deltas: AsyncIterator[list[tuple[int, OutputDelta]]],
) -> None:
    has_logprobs = generation_request.has_logprobs
    try:
        async for batch in deltas:
            before = b""
            if not context.response_started:
                context.cpu.tokens = sum(map(len, generation_request.prompts))
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                await context.start_response(200, headers | {CACHED_HEADER: str(generation_request.count_cached().shown)})
                before = writer.begin()
            began = thread_time() if has_logprobs else 0.0
            data = before + writer.add(batch)
            if began:
                context.cpu.add(excess(thread_time() - began, SECONDS_A_TOKEN, len(batch)))
            if data:
                await context.write(data)
    except Exception as error:
        if not context.response_started:
            raise
        logger.warning("request %s ended in mid-stream: %s", context.request_id, error)
        await context.write(writer.fail(to_api_error(error)), more=False)
        return
    comment = f": usage {_usage_header(generation_request.usage())}\n\n".encode() if USAGE in context.headers else b""
    await context.write(writer.end(comment), more=False)


def _usage_header(usage: Usage) -> str:
    """Return the number of prompt tokens and of generated tokens, separated by a space."""
    return f"{usage.prompt_tokens} {usage.completion_tokens}"
