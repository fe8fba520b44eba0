"""`POST /v1/chat/completions`."""

import time
from array import array
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
from fairlead_worker.api.tokenized import split, trusted
from fairlead_worker.api.worker import Worker


class ChatShape:
    """The JSON of chat completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, id: str, encoder: PromptEncoder, prepared: Prepared, echo: str = "") -> None:
        """`echo`: what every answer begins with."""
        self.id = f"chatcmpl-{id}"
        self._encoder = encoder
        self._prepared = prepared
        self._echo = echo

    def opening(self, index: int) -> dict[str, Any] | None:
        return _delta(index, {"role": "assistant", "content": self._echo})

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        return _delta(index, {"content": piece.text}, self._logprobs(piece))

    def ending(self, index: int, choice: Choice) -> dict[str, Any]:
        return _delta(index, {}) | _finish(choice)

    def whole(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._echo + piece.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(piece)} | _finish(choice)

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
    trusted(worker, request.chat_template, request.chat_template_kwargs)
    model = worker.check_model(request.model)
    with worker.adapters.use(model) as adapter:
        how = instructed(exchange, request, wanted(request, worker.ready.sampling_defaults))
        prompt = given if given is not None else await _prompt(worker, request, how.salt, len(body))
        prepared = prepare(worker, [prompt], how, adapter, await worker.grammar(how.constraint))
        options = request.stream_options
        reply = Reply(
            model=model,
            created=int(time.time()),
            shape=ChatShape(request.request_id or exchange.request_id, worker.encoder, prepared, _echo(request)),
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            usage_comment=USAGE in exchange.headers,
        )
        await answer(exchange, worker, prepared, reply)


async def _prompt(worker: Worker, request: ChatRequest, salt: str, size: int) -> "array[int]":
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
            template_kwargs=_template_kwargs(request),
            scope=salt,
            template=request.chat_template,
            add_special_tokens=bool(request.add_special_tokens),
        ),
        size,
    )


def _template_kwargs(request: ChatRequest) -> dict[str, Any] | None:
    if request.documents is None:
        return request.chat_template_kwargs
    return {**(request.chat_template_kwargs or {}), "documents": request.documents}


def _echo(request: ChatRequest) -> str:
    """vLLM's `echo`: the last message's text, where the answer is in the same role."""
    last = request.messages[-1] if request.echo and request.messages else {}
    speaks = "assistant" if request.add_generation_prompt is not False and not request.continue_final_message else last.get("role")
    content = last.get("content")
    if last.get("role") != speaks or not isinstance(content, str | list):
        return ""
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content if isinstance(part, dict)]
    return "\n".join(part for part in parts if isinstance(part, str))


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _finish(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
