"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages."""

from collections import deque
from collections.abc import Iterable

from fairlead_common.protocols.messages import RENAMED, MessagesBody, chat_body, hides_thinking
from fairlead_worker.api.errors import ApiError, invalid
from fairlead_worker.api.generation.choice import Piece
from fairlead_worker.api.generation.prepare import Prepared
from fairlead_worker.api.http import Exchange
from fairlead_worker.api.openai.chat import counted_chat, prepared_chat
from fairlead_worker.api.protocols.anthropic_blocks import Json, MessageBlocks
from fairlead_worker.api.protocols.chat_body import as_chat, renamed
from fairlead_worker.api.protocols.named_events import named
from fairlead_worker.api.replies import answer
from fairlead_worker.api.router_headers import USAGE
from fairlead_worker.api.schema import parse
from fairlead_worker.api.tokenize import split
from fairlead_worker.api.worker import Worker

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWriter:
    """The JSON of messages."""

    def __init__(self, id: str, model: str, body: MessagesBody, prepared: Prepared) -> None:
        self._id, self._model, self._prepared = id, model, prepared
        self._blocks = MessageBlocks(hides_thinking(body))

    def keep(self, batch: list[tuple[int, Piece]]) -> None:
        for _, piece in batch:
            deque(self._blocks.add(piece.events), maxlen=0)

    def whole(self) -> Json:
        deque(self._blocks.finish(), maxlen=0)
        return self._message() | self._end() | {"usage": self._usage()}

    def begin(self) -> bytes:
        return named({"type": "message_start", "message": self._message() | {"usage": self._usage()}})

    def add(self, batch: list[tuple[int, Piece]]) -> bytes:
        return b"".join(_events(self._blocks.add(piece.events)) for _, piece in batch)

    def end(self, comment: bytes) -> bytes:
        last: list[Json] = [{"type": "message_delta", "delta": self._end(), "usage": self._usage()}, {"type": "message_stop"}]
        return _events([*self._blocks.finish(), *last]) + comment

    def fail(self, error: ApiError) -> bytes:
        return error.event("/v1/messages")

    def _message(self) -> Json:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks.blocks),
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _end(self) -> Json:
        choice = self._prepared.choices[0]
        if choice.shown_reason == "stop" and isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        return {"stop_reason": _STOP_REASONS[choice.shown_reason or "stop"], "stop_sequence": None}

    def _usage(self) -> Json:
        """Anthropic counts what came from the cache apart from the rest of the input."""
        usage = self._prepared.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }


async def messages(worker: Worker, exchange: Exchange) -> None:
    """Answer one request."""
    given, raw = split(exchange, await exchange.body(worker.config.max_body_bytes), worker.prompt_etag)
    body = parse(raw, MessagesBody)
    with renamed(RENAMED):
        if body.max_tokens is None:
            raise invalid("max_tokens: is missing; give the most tokens that the answer may have", param="max_tokens")
        async with prepared_chat(worker, exchange, as_chat(chat_body(body)), given, len(raw)) as (model, prepared, _):
            writer = MessagesWriter(exchange.request_id, model, body, prepared)
            await answer(exchange, worker, prepared, writer, stream=bool(body.stream), usage_comment=USAGE in exchange.headers)


async def count_tokens(worker: Worker, exchange: Exchange) -> None:
    """How many tokens a message's prompt has. What would not be answered is not counted, but for the context's bound."""
    raw = await exchange.body(worker.config.max_body_bytes)
    body = parse(raw, MessagesBody)
    with renamed(RENAMED):
        tokens = await counted_chat(worker, exchange, as_chat(chat_body(body)), len(raw))
    await exchange.json({"input_tokens": tokens})


def _events(events: Iterable[Json]) -> bytes:
    return b"".join(map(named, events))
