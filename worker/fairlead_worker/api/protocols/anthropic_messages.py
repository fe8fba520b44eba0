"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from collections import deque
from collections.abc import Iterable

from fairlead_common.protocols.answer import Answer
from fairlead_common.protocols.messages import RENAMED, MessagesBody, convert, hides_thinking
from fairlead_worker.api.answers.messages import (
    Message,
    MessageDeltaEvent,
    MessageEnd,
    MessageStartEvent,
    MessageStopEvent,
    MessageTokens,
    MessageUsage,
    StopReason,
)
from fairlead_worker.api.errors import ApiError, invalid
from fairlead_worker.api.generation.choice import OutputDelta
from fairlead_worker.api.generation.prepare import GenerationRequest
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.openai.chat import count_chat_tokens, prepare_chat
from fairlead_worker.api.protocols.anthropic_blocks import MessageBlocks
from fairlead_worker.api.protocols.chat_body import rename_error_fields, to_chat_request
from fairlead_worker.api.protocols.named_events import encode_named_event
from fairlead_worker.api.replies import send_answer
from fairlead_worker.api.schema import ChatRequest, parse
from fairlead_worker.api.tokenize import read_tokenized_body
from fairlead_worker.api.worker import Worker

_STOP_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWriter:
    """Writes the JSON of messages."""

    def __init__(self, id: str, model: str, body: MessagesBody, generation_request: GenerationRequest) -> None:
        self._id, self._model, self._generation_request = id, model, generation_request
        self._max_tokens = body.max_tokens or 0
        self._blocks = MessageBlocks(hides_thinking(body))

    def collect(self, batch: list[tuple[int, OutputDelta]]) -> None:
        for _, delta in batch:
            deque(self._blocks.add(delta.events), maxlen=0)

    def document(self) -> Message:
        deque(self._blocks.finish(), maxlen=0)
        return self._message(*self._end())

    def begin(self) -> bytes:
        return encode_named_event(MessageStartEvent(self._message()))

    def add(self, batch: list[tuple[int, OutputDelta]]) -> bytes:
        return b"".join(_events(self._blocks.add(delta.events)) for _, delta in batch)

    def end(self, comment: bytes) -> bytes:
        last = [MessageDeltaEvent(MessageEnd(*self._end()), self._usage()), MessageStopEvent()]
        return _events([*self._blocks.finish(), *last]) + comment

    def fail(self, error: ApiError) -> bytes:
        return error.event("/v1/messages")

    def _message(self, stop_reason: StopReason | None = None, stop_sequence: str | None = None) -> Message:
        return Message(
            id=f"msg_{self._id}",
            model=self._model,
            content=list(self._blocks.blocks),
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self._usage(),
        )

    def _end(self) -> tuple[StopReason, str | None]:
        """Return why the message ended, and the stop sequence that ended it."""
        choice = self._generation_request.choices[0]
        if choice.client_finish_reason == "stop" and isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        if choice.client_finish_reason == "length" and self._generation_request.usage().completion_tokens < self._max_tokens:
            return "model_context_window_exceeded", None
        return _STOP_REASONS[choice.client_finish_reason or "stop"], None

    def _usage(self) -> MessageUsage:
        """Return the usage. Anthropic counts cached input tokens separately from the rest of the input."""
        usage = self._generation_request.usage()
        uncached = usage.prompt_tokens - usage.cached_tokens
        return MessageUsage(input_tokens=uncached, cache_read_input_tokens=usage.cached_tokens, output_tokens=usage.completion_tokens)


async def messages(worker: Worker, context: RequestContext) -> None:
    """Handle one request."""
    prompt_tokens, raw = await read_tokenized_body(worker, context)
    body = parse(raw, MessagesBody)
    with rename_error_fields(RENAMED) as tool_fields:
        if body.max_tokens is None:
            raise invalid("max_tokens: is missing; give the most tokens that the answer may have", param="max_tokens")
        request = _chat_request(worker, body, tool_fields)
        # Claude Code asks for 32,000 tokens whatever the model's context is.
        async with prepare_chat(worker, context, request, prompt_tokens, len(raw), ends_at_context=True) as (model, generation_request, _):
            writer = MessagesWriter(context.request_id, model, body, generation_request)
            await send_answer(context, worker, generation_request, writer, stream=bool(body.stream))


async def count_tokens(worker: Worker, context: RequestContext) -> None:
    """Count the tokens of a message's prompt. Refuse what generation would refuse, except for the context length."""
    raw = await context.read_body(worker.config.limits.max_body_bytes)
    body = parse(raw, MessagesBody)
    with rename_error_fields(RENAMED) as tool_fields:
        tokens = await count_chat_tokens(worker, context, _chat_request(worker, body, tool_fields), len(raw))
    await context.respond_json(MessageTokens(tokens))


def _events(events: Iterable[Answer]) -> bytes:
    return b"".join(map(encode_named_event, events))


def _chat_request(worker: Worker, body: MessagesBody, tool_fields: list[str]) -> ChatRequest:
    """Return a message request as a chat request. A model that takes no thinking budget ignores it: clients send one to every model."""
    conversion = convert(body)
    tool_fields += conversion.tool_fields
    if worker.output_parsers.budget_problem:
        conversion.chat.pop("thinking_token_budget", None)
    return to_chat_request(conversion)
