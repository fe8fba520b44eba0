"""`POST /v1/chat/completions`."""

import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fairlead_index.prompt import PromptEncoder
from fairlead_worker.api.choice import Choice, Piece
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.generation import Prepared, prepare
from fairlead_worker.api.http import Exchange
from fairlead_worker.api.internal import USAGE, instructed
from fairlead_worker.api.logprobs import chat_logprobs, prompt_logprobs
from fairlead_worker.api.sampling import wanted
from fairlead_worker.api.schema import ChatRequest, parse
from fairlead_worker.api.streaming import Reply, answer
from fairlead_worker.api.tokenized import split
from fairlead_worker.api.worker import Worker
from fairlead_worker.parsing.events import CallArguments, CallBegun, Event, Reasoning, Text, gather


class ChatShape:
    """The JSON of chat completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, id: str, encoder: PromptEncoder, prepared: Prepared) -> None:
        self.id = f"chatcmpl-{id}"
        self._encoder = encoder
        self._prepared = prepared

    def opening(self, index: int) -> dict[str, Any] | None:
        return _delta(index, {"role": "assistant", "content": ""})

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        shown = [_delta(index, _shown(event)) for event in piece.events] or [_delta(index, {"content": ""})]
        shown[0]["logprobs"] = chat_logprobs(self._encoder, piece)
        return shown

    def ending(self, index: int, choice: Choice) -> dict[str, Any]:
        return _delta(index, {}) | _finish(choice)

    def whole(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {"index": index, "message": _message(piece), "logprobs": chat_logprobs(self._encoder, piece)} | _finish(choice)

    def beside(self) -> dict[str, Any]:
        """vLLM has the prompt's log-probabilities beside the choices."""
        prepared = self._prepared
        return {"prompt_logprobs": prompt_logprobs(self._encoder, prepared.prompts[0], prepared.scores(0))} if prepared.scored else {}


async def chat_completions(worker: Worker, exchange: Exchange) -> None:
    """Answer one request."""
    given, body = split(exchange, await exchange.body(worker.config.max_body_bytes), worker.prompt_etag)
    request = parse(body, ChatRequest)
    async with prepared_chat(worker, exchange, request, given, len(body)) as (model, prepared):
        options = request.stream_options
        reply = Reply(
            model=model,
            created=int(time.time()),
            shape=ChatShape(exchange.request_id, worker.encoder, prepared),
            stream=bool(request.stream),
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            usage_comment=USAGE in exchange.headers,
        )
        await answer(exchange, worker, prepared, reply)


@asynccontextmanager
async def prepared_chat(
    worker: Worker, exchange: Exchange, request: ChatRequest, given: "array[int] | None", size: int
) -> "AsyncIterator[tuple[str, Prepared]]":
    """The model's name and what the engine is asked for: a chat's, whichever API it came by. The adapter is held for as long.

    `given`: the prompt's tokens, where the router has made them. `size`: bytes of the body.
    """
    model = worker.check_model(request.model)
    with worker.adapters.use(model) as adapter:
        how = instructed(exchange, request, wanted(request, worker.ready.sampling_defaults))
        prompt = given if given is not None else await encoded(worker, request, how.salt, size)
        yield model, prepare(worker, [prompt], how, adapter, await worker.grammar(how.constraint))


async def encoded(worker: Worker, request: ChatRequest, salt: str, size: int) -> "array[int]":
    """The prompt's tokens."""
    if request.messages is None:
        raise invalid("messages: is missing; give a list of messages", param="messages")
    continues = bool(request.continue_final_message)
    generation_prompt = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return await worker.encode(
        lambda: worker.encoder.encode_chat(
            request.messages,
            tools=request.tools or None,
            add_generation_prompt=generation_prompt,
            continue_final_message=continues,
            template_kwargs=request.chat_template_kwargs,
            scope=salt,
        ),
        size,
    )


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


def _message(piece: Piece) -> dict[str, Any]:
    """All of an answer. It has no content where it does nothing but call."""
    whole = gather(piece.events)
    message: dict[str, Any] = {"role": "assistant", "content": whole.text or (None if whole.calls else ""), "refusal": None}
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
