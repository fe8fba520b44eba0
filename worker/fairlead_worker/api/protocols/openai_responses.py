"""`POST /v1/responses`: OpenAI's Responses, without state."""

import time
from collections import deque
from collections.abc import Iterable

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_common.protocols.responses import RENAMED, ResponsesBody, chat_body
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.choice import Piece
from fairlead_worker.api.generation.logprobs import chat_logprobs
from fairlead_worker.api.generation.prepare import Prepared
from fairlead_worker.api.http import Exchange
from fairlead_worker.api.openai.chat import prepared_chat
from fairlead_worker.api.protocols.chat_body import as_chat, renamed
from fairlead_worker.api.protocols.named_events import named
from fairlead_worker.api.protocols.openai_response_items import Json, ResponseItems, Status
from fairlead_worker.api.replies import answer
from fairlead_worker.api.router_headers import USAGE
from fairlead_worker.api.schema import parse
from fairlead_worker.api.tokenize import split
from fairlead_worker.api.worker import Worker

_ECHOED = (
    "instructions", "metadata", "max_output_tokens", "max_tool_calls", "user", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip


class ResponsesWriter:
    """The JSON of responses."""

    def __init__(self, id: str, model: str, body: ResponsesBody, prepared: Prepared, encoder: PromptEncoder) -> None:
        self._model, self._body, self._prepared, self._encoder = model, body, prepared, encoder
        self._id = id
        self._created = int(time.time())
        self._items = ResponseItems(id)
        self._number = 0

    def keep(self, batch: list[tuple[int, Piece]]) -> None:
        for _, piece in batch:
            deque(self._add(piece), maxlen=0)

    def whole(self) -> Json:
        return self._finished()[1]

    def begin(self) -> bytes:
        begun = self._response("in_progress")
        return self._events([{"type": f"response.{what}", "response": begun} for what in ("created", "in_progress")])

    def add(self, batch: list[tuple[int, Piece]]) -> bytes:
        return b"".join(self._events(self._add(piece)) for _, piece in batch)

    def end(self, comment: bytes) -> bytes:
        events, response = self._finished()
        last = {"type": f"response.{response['status']}", "response": response}
        return self._events([*events, last]) + comment

    def fail(self, error: ApiError) -> bytes:
        """The event that says it, and the one with which a response ends that failed."""
        said = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._events([said, {"type": "response.failed", "response": response}])

    def _add(self, piece: Piece) -> Iterable[Json]:
        logprobs = chat_logprobs(self._encoder, piece)
        return self._items.add(piece.events, logprobs["content"] if logprobs else [])

    def _finished(self) -> tuple[list[Json], Json]:
        """The last events, and the whole response."""
        status: Status = "incomplete" if self._prepared.choices[0].shown_reason == "length" else "completed"
        events = list(self._items.finish(status))
        response = self._response(status) | {"usage": self._usage()}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        return events, response

    def _response(self, status: str) -> Json:
        body, sampling = self._body, self._prepared.submissions[0].sampling
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": list(self._items.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
            "store": False,
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
        usage = self._prepared.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._prepared.choices[0].reasoning_tokens or 0},
            "total_tokens": usage["total_tokens"],
        }

    def _events(self, events: Iterable[Json]) -> bytes:
        out = bytearray()
        for event in events:
            out += named(event | {"sequence_number": self._number})
            self._number += 1
        return bytes(out)


async def responses(worker: Worker, exchange: Exchange) -> None:
    """Answer one request."""
    given, raw = split(exchange, await exchange.body(worker.config.max_body_bytes), worker.prompt_etag)
    body = parse(raw, ResponsesBody)
    with renamed(RENAMED):
        async with prepared_chat(worker, exchange, as_chat(chat_body(body)), given, len(raw)) as (model, prepared, _):
            writer = ResponsesWriter(exchange.request_id, model, body, prepared, worker.encoder)
            await answer(exchange, worker, prepared, writer, stream=bool(body.stream), usage_comment=USAGE in exchange.headers)
