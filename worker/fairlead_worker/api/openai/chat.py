"""`POST /v1/chat/completions`."""

import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fairlead_common.prompts.chat_request import build_encode_kwargs
from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.generation.choice import Choice, Piece
from fairlead_worker.api.generation.logprobs import chat_logprobs, prompt_logprobs
from fairlead_worker.api.generation.prepare import Prepared, checked_sampling, prepare
from fairlead_worker.api.generation.sampling import Wanted, wanted
from fairlead_worker.api.http import Exchange
from fairlead_worker.api.openai.streaming import Reply, answer
from fairlead_worker.api.router_headers import USAGE, instructed
from fairlead_worker.api.schema import ChatRequest, parse
from fairlead_worker.api.tokenize import split, trusted
from fairlead_worker.api.tool_choice import ToolUse, tool_use
from fairlead_worker.api.worker import Worker
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.parsing.events import CallArguments, CallBegun, Event, Reasoning, Text, gather


class ChatShape:
    """The JSON of chat completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self, id: str, encoder: PromptEncoder, prepared: Prepared, may_call: bool = False, reasoning: bool = True, echo: str = ""
    ) -> None:
        """`may_call`: the answer may have no content. `reasoning`: it is shown. `echo`: what every answer begins with."""
        self.id = f"chatcmpl-{id}"
        self._encoder = encoder
        self._prepared = prepared
        self._may_call, self._reasoning, self._echo = may_call, reasoning, echo

    def opening(self, index: int) -> dict[str, Any] | None:
        return _delta(index, {"role": "assistant", "content": self._echo or (None if self._may_call else "")})

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        logprobs = self._logprobs(piece)
        shown = [_delta(index, _shown(event)) for event in self._events(piece)]
        if logprobs is not None or (piece.tokens and self._prepared.show.token_ids):
            shown = shown or [_delta(index, {})]
            shown[0]["logprobs"] = logprobs
        return shown

    def ending(self, index: int, choice: Choice) -> dict[str, Any]:
        return _delta(index, {}) | _finish(choice)

    def whole(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        message = _message(self._echo, self._events(piece))
        return {"index": index, "message": message, "logprobs": self._logprobs(piece)} | _finish(choice)

    def _events(self, piece: Piece) -> list[Event]:
        return piece.events if self._reasoning else [event for event in piece.events if not isinstance(event, Reasoning)]

    def beside(self) -> dict[str, Any]:
        """vLLM has the prompt's log-probabilities and its token ids beside the choices."""
        prepared, prompt = self._prepared, self._prepared.prompts[0]
        scores = {"prompt_logprobs": prompt_logprobs(self._encoder, prompt, prepared.scores(0))} if prepared.scored else {}
        return scores | ({"prompt_token_ids": prompt.tolist()} if prepared.show.token_ids else {})

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return chat_logprobs(self._encoder, piece, self._prepared.show.tokens_by_id)


async def chat_completions(worker: Worker, exchange: Exchange) -> None:
    """Answer one request."""
    given, body = split(exchange, await exchange.body(worker.config.max_body_bytes), worker.prompt_etag)
    request = parse(body, ChatRequest)
    async with prepared_chat(worker, exchange, request, given, len(body)) as (model, prepared, use):
        options = request.stream_options
        reply = Reply(
            model=model,
            created=int(time.time()),
            shape=ChatShape(
                request.request_id or exchange.request_id,
                worker.encoder,
                prepared,
                may_call=bool(use.callable),
                reasoning=request.include_reasoning is not False,
                echo=_echo(request),
            ),
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            usage_comment=USAGE in exchange.headers,
        )
        await answer(exchange, worker, prepared, reply)


@dataclass(frozen=True, slots=True)
class CheckedChat:
    """A chat in which nothing is wrong, as far as can be said without the context's length."""

    prompt: "array[int]"
    how: Wanted
    use: ToolUse
    form: Constraint | None
    grammar: str
    """What `Worker.grammar` says of `form`."""


async def checked_chat(
    worker: Worker, exchange: Exchange, request: ChatRequest, given: "array[int] | None", size: int, bounded: bool = True
) -> CheckedChat:
    """`given`: the prompt's tokens, where the router has made them. `size`: bytes of the body. `bounded`: what is sure to be too long is
    refused before it is tokenized. Raises ApiError 400."""
    trusted(worker, request.chat_template, request.chat_template_kwargs)
    how = instructed(exchange, request, wanted(request, worker.ready.sampling_defaults))
    use = tool_use(request)
    most = worker.max_model_len if bounded and how.truncate is None else None
    prompt = given if given is not None else await encoded(worker, request, how.salt, size, most)
    form = worker.reading.form(how.constraint, use, prompt)
    return CheckedChat(prompt, how, use, form, await worker.grammar(form))


@asynccontextmanager
async def prepared_chat(
    worker: Worker, exchange: Exchange, request: ChatRequest, given: "array[int] | None", size: int
) -> "AsyncIterator[tuple[str, Prepared, ToolUse]]":
    """The model's name, what the engine is asked for, and which tools may be called: of a chat, whichever API it came by. The adapter is
    held for as long. `given`, `size`: as for `checked_chat`."""
    model = worker.check_model(request.model)
    with worker.adapters.use(model) as adapter:
        chat = await checked_chat(worker, exchange, request, given, size)
        parsers = worker.reading.parsers(chat.form, chat.use, chat.prompt)
        yield model, prepare(worker, [chat.prompt], chat.how, adapter, chat.grammar, parsers, field="messages"), chat.use


async def counted_chat(worker: Worker, exchange: Exchange, request: ChatRequest, size: int) -> int:
    """Tokens of a chat's prompt, however many. Raises ApiError for all else that an answer would be refused for."""
    worker.check_model(request.model)
    chat = await checked_chat(worker, exchange, request, None, size, bounded=False)
    checked_sampling(worker, chat.how)
    worker.check_tokens(chat.prompt, "messages")
    return len(chat.prompt)


async def encoded(worker: Worker, request: ChatRequest, salt: str, size: int, most: int | None = None) -> "array[int]":
    """The prompt's tokens; ApiError 400 before they are made where they are sure to be more than `most`."""
    if request.messages is None:
        raise invalid("messages: is missing; give a list of messages", param="messages")
    return await worker.encode(lambda: worker.encoder.encode_chat(**build_encode_kwargs(request), scope=salt, most=most), size)


def _echo(request: ChatRequest) -> str:
    """vLLM's `echo`: the last message's text, where the answer is in the same role."""
    last = request.messages[-1] if request.echo and request.messages else {}
    speaks = "assistant" if request.add_generation_prompt is not False and not request.continue_final_message else last.get("role")
    content = last.get("content")
    if last.get("role") != speaks or not isinstance(content, str | list):
        return ""
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content if isinstance(part, dict)]
    return "\n".join(part for part in parts if isinstance(part, str))


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _shown(event: Event) -> dict[str, Any]:
    match event:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallBegun(index, id, name):
            return {"tool_calls": [{"index": index} | _call(id, name, "")]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(echo: str, events: list[Event]) -> dict[str, Any]:
    """All of an answer, behind `echo`. It has no content where it does nothing but call."""
    whole = gather(events)
    message: dict[str, Any] = {"role": "assistant", "content": echo + whole.text or (None if whole.calls else ""), "refusal": None}
    if whole.reasoning:
        message |= _reasoning(whole.reasoning)
    if whole.calls:
        message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in whole.calls]
    return message


def _reasoning(text: str) -> dict[str, Any]:
    """Under the name that vLLM has now, and the one that it had, as DeepSeek has it."""
    return {"reasoning": text, "reasoning_content": text}


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.shown_reason, "stop_reason": choice.stop_reason}
