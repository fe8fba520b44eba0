"""`POST /v1/responses`: OpenAI's Responses API."""

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Literal

import msgspec

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_common.protocols.conversion import OfferedTool
from fairlead_common.protocols.errors import ErrorEvent
from fairlead_common.protocols.responses import RENAMED, ResponsesBody, convert
from fairlead_worker.api.answers.responses import (
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseStateEvent,
    ResponseStreamEvent,
    ResponseUsage,
)
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.choice import OutputDelta
from fairlead_worker.api.generation.logprobs import format_chat_logprobs
from fairlead_worker.api.generation.prepare import GenerationRequest
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.openai.chat import prepare_chat
from fairlead_worker.api.protocols.chat_body import rename_error_fields, to_chat_request
from fairlead_worker.api.protocols.named_events import encode_named_event
from fairlead_worker.api.protocols.openai_response_items import ResponseItems, Status
from fairlead_worker.api.protocols.stored_responses import read_conversation, response_keys, save_response
from fairlead_worker.api.replies import send_answer
from fairlead_worker.api.schema import parse
from fairlead_worker.api.tokenize import read_tokenized_body
from fairlead_worker.api.worker import Worker

_State = Literal["response.completed", "response.incomplete"]
_FINAL: dict[str, _State] = {"completed": "response.completed", "incomplete": "response.incomplete"}


class ResponsesWriter:
    """Writes the JSON of responses."""

    def __init__(
        self,
        id: str,
        model: str,
        body: ResponsesBody,
        generation_request: GenerationRequest,
        encoder: PromptEncoder,
        tools: Mapping[str, OfferedTool],
        save: Callable[[Response], Awaitable[bool]] | None = None,
    ) -> None:
        """`tools`: those with another form than the chat's. `save`: stores the whole response, and returns whether that worked."""
        self._model, self._body, self._generation_request, self._encoder = model, body, generation_request, encoder
        self._id, self._save, self._stored = id, save, save is not None
        self._finished: tuple[list[ItemEvent], Response] | None = None
        self._created = int(time.time())
        self._items = ResponseItems(id, tools)
        self._number = 0

    def collect(self, batch: list[tuple[int, OutputDelta]]) -> None:
        for _, delta in batch:
            deque(self._add(delta), maxlen=0)

    def document(self) -> Response:
        return self._finish()[1]

    def begin(self) -> bytes:
        begun = self._response("in_progress")
        return self._events([ResponseStateEvent("response.created", begun), ResponseStateEvent("response.in_progress", begun)])

    def add(self, batch: list[tuple[int, OutputDelta]]) -> bytes:
        return b"".join(self._events(self._add(delta)) for _, delta in batch)

    def end(self, comment: bytes) -> bytes:
        events, response = self._finish()
        return self._events([*events, ResponseStateEvent(_FINAL[response.status], response)]) + comment

    def fail(self, error: ApiError) -> bytes:
        """Return an error event and the `response.failed` event."""
        error_event = ErrorEvent(code=error.code, message=error.message, param=error.param)
        response = self._response("failed")
        response.error = ResponseError("server_error", error.message)
        return self._events([error_event, ResponseStateEvent("response.failed", response)])

    def _add(self, delta: OutputDelta) -> Iterable[ItemEvent]:
        logprobs = format_chat_logprobs(self._encoder, delta)
        return self._items.add(delta.events, logprobs.content if logprobs else [])

    async def save(self) -> None:
        """Store the response if the client asked for it. A client may refer to it as soon as it has the end of the answer."""
        if self._save is not None:
            response = self._finish()[1]
            response.store = await self._save(response)

    def _finish(self) -> tuple[list[ItemEvent], Response]:
        """Return the last events and the whole response."""
        if self._finished is None:
            self._finished = self._build_end()
        return self._finished

    def _build_end(self) -> tuple[list[ItemEvent], Response]:
        status: Status = "incomplete" if self._generation_request.choices[0].client_finish_reason == "length" else "completed"
        events = list(self._items.finish(status))
        response = self._response(status)
        response.usage = self._usage()
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails()
        else:
            response.completed_at = int(time.time())
        return events, response

    def _response(self, status: Literal["in_progress", "completed", "incomplete", "failed"]) -> Response:
        body, sampling = self._body, self._generation_request.submits[0].sampling
        return Response(
            id=self._id if self._id.startswith("resp_") else f"resp_{self._id}",
            created_at=self._created,
            status=status,
            model=self._model,
            output=list(self._items.items),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": None, "summary": None} | (body.reasoning or {}),
            store=self._stored,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            text={"format": {"type": "text"}} | (body.text or {}),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            instructions=body.instructions,
            metadata=body.metadata,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            prompt_cache_retention=body.prompt_cache_retention,
        )

    def _usage(self) -> ResponseUsage:
        usage = self._generation_request.usage()
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(self._generation_request.choices[0].reasoning_tokens or 0),
            usage.total_tokens,
        )

    def _events(self, events: Iterable[ResponseStreamEvent]) -> bytes:
        out = bytearray()
        for event in events:
            event.sequence_number = self._number
            out += encode_named_event(event)
            self._number += 1
        return bytes(out)


async def responses(worker: Worker, context: RequestContext) -> None:
    """Handle one request."""
    prompt_tokens, raw = await read_tokenized_body(worker, context)
    body = parse(raw, ResponsesBody)
    keys = response_keys(worker, context, body)
    conversation = await read_conversation(worker, context, keys, body)
    stored_as = keys if body.store else None
    with rename_error_fields(RENAMED) as tool_fields:
        with context.cpu.measure():
            size = len(raw) + (0 if conversation is body else len(msgspec.json.encode(conversation.input)))
            conversion = convert(conversation)
            tool_fields += conversion.tool_fields
            chat = to_chat_request(conversion)
        async with prepare_chat(worker, context, chat, prompt_tokens, size) as (model, generation_request, _):
            save = None if stored_as is None else partial(save_response, worker, stored_as, conversation)
            id = context.request_id if stored_as is None else stored_as.first_id
            writer = ResponsesWriter(id, model, body, generation_request, worker.encoder, conversion.tools, save)
            before_end = None if save is None else writer.save
            await send_answer(context, worker, generation_request, writer, stream=bool(body.stream), before_end=before_end)
