"""`POST /v1/responses`: OpenAI's Responses API."""

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import msgspec

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_common.protocols.responses import RENAMED, ResponsesBody, chat_body
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.choice import OutputDelta
from fairlead_worker.api.generation.logprobs import format_chat_logprobs
from fairlead_worker.api.generation.prepare import GenerationRequest
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.openai.chat import prepare_chat
from fairlead_worker.api.protocols.chat_body import rename_error_fields, to_chat_request
from fairlead_worker.api.protocols.named_events import encode_named_event
from fairlead_worker.api.protocols.openai_response_items import Json, ResponseItems, Status
from fairlead_worker.api.protocols.stored_responses import read_conversation, response_keys, save_response
from fairlead_worker.api.replies import send_answer
from fairlead_worker.api.router_headers import USAGE
from fairlead_worker.api.schema import parse
from fairlead_worker.api.tokenize import split_token_prefix
from fairlead_worker.api.worker import Worker

_ECHOED = (
    "instructions", "metadata", "max_output_tokens", "max_tool_calls", "user", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip


class ResponsesWriter:
    """Writes the JSON of responses."""

    def __init__(
        self,
        id: str,
        model: str,
        body: ResponsesBody,
        generation_request: GenerationRequest,
        encoder: PromptEncoder,
        save: Callable[[Json], Awaitable[bool]] | None = None,
    ) -> None:
        """`save`: stores the whole response, and returns whether that worked."""
        self._model, self._body, self._generation_request, self._encoder = model, body, generation_request, encoder
        self._id, self._save, self._stored = id, save, save is not None
        self._finished: tuple[list[Json], Json] | None = None
        self._created = int(time.time())
        self._items = ResponseItems(id)
        self._number = 0

    def collect(self, batch: list[tuple[int, OutputDelta]]) -> None:
        for _, delta in batch:
            deque(self._add(delta), maxlen=0)

    def document(self) -> Json:
        return self._finish()[1]

    def begin(self) -> bytes:
        begun = self._response("in_progress")
        return self._events([{"type": f"response.{what}", "response": begun} for what in ("created", "in_progress")])

    def add(self, batch: list[tuple[int, OutputDelta]]) -> bytes:
        return b"".join(self._events(self._add(delta)) for _, delta in batch)

    def end(self, comment: bytes) -> bytes:
        events, response = self._finish()
        last = {"type": f"response.{response['status']}", "response": response}
        return self._events([*events, last]) + comment

    def fail(self, error: ApiError) -> bytes:
        """Return an error event and the `response.failed` event."""
        error_event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._events([error_event, {"type": "response.failed", "response": response}])

    def _add(self, delta: OutputDelta) -> Iterable[Json]:
        logprobs = format_chat_logprobs(self._encoder, delta)
        return self._items.add(delta.events, logprobs["content"] if logprobs else [])

    async def save(self) -> None:
        """Store the response if the client asked for it. A client may refer to it as soon as it has the end of the answer."""
        if self._save is not None:
            response = self._finish()[1]
            response["store"] = await self._save(response)

    def _finish(self) -> tuple[list[Json], Json]:
        """Return the last events and the whole response."""
        if self._finished is None:
            self._finished = self._build_end()
        return self._finished

    def _build_end(self) -> tuple[list[Json], Json]:
        status: Status = "incomplete" if self._generation_request.choices[0].client_finish_reason == "length" else "completed"
        events = list(self._items.finish(status))
        response = self._response(status) | {"usage": self._usage()}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        return events, response

    def _response(self, status: str) -> Json:
        body, sampling = self._body, self._generation_request.submissions[0].sampling
        return {
            "id": self._id if self._id.startswith("resp_") else f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": list(self._items.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
            "store": self._stored,
            "background": False,
            "service_tier": "default",
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "text": {"format": {"type": "text"}} | (body.text or {}),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "usage": None,
            **{name: getattr(body, name) for name in _ECHOED},
        }

    def _usage(self) -> Json:
        usage = self._generation_request.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._generation_request.choices[0].reasoning_tokens or 0},
            "total_tokens": usage["total_tokens"],
        }

    def _events(self, events: Iterable[Json]) -> bytes:
        out = bytearray()
        for event in events:
            out += encode_named_event(event | {"sequence_number": self._number})
            self._number += 1
        return bytes(out)


async def responses(worker: Worker, context: RequestContext) -> None:
    """Handle one request."""
    prompt_tokens, raw = split_token_prefix(context, await context.read_body(worker.config.limits.max_body_bytes), worker.prompt_etag)
    body = parse(raw, ResponsesBody)
    keys = response_keys(worker, context, body)
    conversation = await read_conversation(worker, keys, body)
    size = len(raw) + (0 if conversation is body else len(msgspec.json.encode(conversation.input)))
    stored_as = keys if body.store else None
    with rename_error_fields(RENAMED):
        chat = to_chat_request(chat_body(conversation))
        async with prepare_chat(worker, context, chat, prompt_tokens, size) as (model, generation_request, _):
            save = None if stored_as is None else partial(save_response, worker, stored_as, conversation)
            id = context.request_id if stored_as is None else stored_as.first_id
            writer = ResponsesWriter(id, model, body, generation_request, worker.encoder, save)
            before_end = None if save is None else writer.save
            comment, stream = USAGE in context.headers, bool(body.stream)
            await send_answer(context, worker, generation_request, writer, stream=stream, usage_comment=comment, before_end=before_end)
