"""`POST /v1/completions`."""

import time
from array import array
from typing import Any

from fairlead_worker.api.errors import invalid
from fairlead_worker.api.generation.choice import Choice, Piece
from fairlead_worker.api.generation.logprobs import CompletionLogprobs, prompt_logprobs
from fairlead_worker.api.generation.prepare import Prepared, prepare
from fairlead_worker.api.generation.sampling import Wanted, wanted
from fairlead_worker.api.http import Exchange
from fairlead_worker.api.openai.streaming import Reply, answer
from fairlead_worker.api.router_headers import USAGE, instructed
from fairlead_worker.api.schema import CompletionRequest, parse
from fairlead_worker.api.tokenize import split
from fairlead_worker.api.worker import Worker

MAX_SEQUENCES = 1024
"""Prompts times best_of (or n) of one request."""


class CompletionShape:
    """The JSON of text completions."""

    chunk_object = whole_object = "text_completion"

    def __init__(self, id: str, worker: Worker, prepared: Prepared, request: CompletionRequest) -> None:
        self.id = f"cmpl-{id}"
        self._encoder = worker.encoder
        self._prepared = prepared
        skip = not prepared.show.special_tokens
        self._echoes = [worker.encoder.decode(prompt, skip) if request.echo else "" for prompt in prepared.prompts]
        self._echo_logprobs = bool(request.echo) and request.logprobs is not None
        self._prompt_logprobs = request.prompt_logprobs is not None
        self._logprobs = [CompletionLogprobs(worker.encoder, prepared.show.tokens_by_id) for _ in range(len(self._echoes) * prepared.n)]

    def opening(self, index: int) -> dict[str, Any] | None:
        prompt = index // self._prepared.n
        if not (self._echoes[prompt] or self._echo_logprobs or self._prepared.show.token_ids):
            return None
        return _choice(index, self._echoes[prompt], self._echoed(index)) | self._prompt_ids(prompt)

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return [_choice(index, piece.text, self._logprobs[index].take(piece))]

    def ending(self, index: int, choice: Choice) -> dict[str, Any]:
        return _choice(index, "") | _finish(choice)

    def whole(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        prompt = index // self._prepared.n
        logprobs = self._echoed(index, piece) if self._echo_logprobs else self._logprobs[index].take(piece)
        whole = _choice(index, self._echoes[prompt] + piece.text, logprobs) | _finish(choice) | self._prompt_ids(prompt)
        if self._prompt_logprobs:
            scores = self._prepared.scores(prompt)
            whole["prompt_logprobs"] = prompt_logprobs(self._encoder, self._prepared.prompts[prompt], scores)
        return whole

    def beside(self) -> dict[str, Any]:
        return {}

    def _prompt_ids(self, prompt: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prepared.prompts[prompt].tolist()} if self._prepared.show.token_ids else {}

    def _echoed(self, index: int, piece: Piece | None = None) -> dict[str, Any] | None:
        """The prompt's log-probabilities, and those of `piece` after them."""
        if not self._echo_logprobs:
            return None
        prompt = index // self._prepared.n
        return self._logprobs[index].echo(self._prepared.prompts[prompt], self._prepared.scores(prompt), piece)


async def completions(worker: Worker, exchange: Exchange) -> None:
    """Answer one request."""
    given, body = split(exchange, await exchange.body(worker.config.max_body_bytes), worker.prompt_etag)
    request = parse(body, CompletionRequest)
    model = worker.check_model(request.model)
    with worker.adapters.use(model) as adapter:
        how = instructed(exchange, request, wanted(request, worker.ready.sampling_defaults))
        prompts = [given] if given is not None else await _prompts(worker, request, how)
        prepared = prepare(worker, prompts, how, adapter, await worker.grammar(how.constraint))
        options = request.stream_options
        reply = Reply(
            model=model,
            created=int(time.time()),
            shape=CompletionShape(request.request_id or exchange.request_id, worker, prepared, request),
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            usage_comment=USAGE in exchange.headers,
        )
        await answer(exchange, worker, prepared, reply)


async def _prompts(worker: Worker, request: CompletionRequest, how: Wanted) -> "list[array[int]]":
    """One text, several texts, one list of token ids, or several."""
    prompt = request.prompt
    if prompt is None or prompt == []:
        raise invalid("prompt: is missing; give a string, token ids, or a list of either", param="prompt")
    texts: list[Any]
    if isinstance(prompt, str) or all(isinstance(token, int) for token in prompt):
        texts = [prompt]
    elif all(isinstance(text, str) for text in prompt) or all(isinstance(text, list) for text in prompt):
        texts = list(prompt)
    else:
        raise invalid("prompt: the list mixes strings and token ids", param="prompt")
    if len(texts) * how.best_of > MAX_SEQUENCES:
        raise invalid(f"prompt: {len(texts)} prompts times {how.best_of} choices are more than {MAX_SEQUENCES} sequences", param="prompt")
    special, most = request.add_special_tokens is not False, worker.max_model_len if how.truncate is None else None
    return [await _encode(worker, text, how.salt, special, most) for text in texts]


async def _encode(worker: Worker, text: "str | list[int]", salt: str, special: bool, most: int | None) -> "array[int]":
    if isinstance(text, list):
        return array("I", text)
    return await worker.encode(lambda: worker.encoder.encode_text(text, special, salt, most), len(text))


def _choice(index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}


def _finish(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
