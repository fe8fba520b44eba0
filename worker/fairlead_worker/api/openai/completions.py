"""`POST /v1/completions`."""

from array import array
from dataclasses import replace
from typing import Any

from fairlead_worker.api.answers.completions import Completion, CompletionChoice, CompletionLogprobs
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.generation.choice import Choice, OutputDelta
from fairlead_worker.api.generation.logprobs import CompletionLogprobsFormatter, format_prompt_logprobs
from fairlead_worker.api.generation.prepare import GenerationRequest, prepare
from fairlead_worker.api.generation.sampling import GenerationOptions, read_options
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.openai.streaming import ChunkWriter
from fairlead_worker.api.replies import send_answer
from fairlead_worker.api.router_headers import read_origin
from fairlead_worker.api.schema import CompletionRequest, parse
from fairlead_worker.api.tokenize import TextOrTokens, list_texts, read_tokenized_body
from fairlead_worker.api.worker import Worker

MAX_SEQUENCES = 1024
"""Prompts times `best_of` (or `n`) of one request."""


class CompletionFormatter:
    """Builds the JSON of text completions."""

    chunk_type = whole_type = Completion

    def __init__(self, id: str, worker: Worker, generation_request: GenerationRequest, request: CompletionRequest) -> None:
        self.id = f"cmpl-{id}"
        self._encoder = worker.encoder
        self._generation_request = generation_request
        skip = not generation_request.options.include_special_tokens
        self._echoes = [worker.encoder.decode(prompt, skip) if request.echo else "" for prompt in generation_request.prompts]
        self._echo_logprobs = bool(request.echo) and request.logprobs is not None
        self._prompt_logprobs = request.prompt_logprobs is not None
        self._logprobs = [
            CompletionLogprobsFormatter(worker.encoder, generation_request.options.tokens_as_token_ids, skip)
            for _ in range(len(self._echoes) * generation_request.options.n)
        ]

    def first_chunk(self, index: int) -> CompletionChoice | None:
        prompt = index // self._generation_request.options.n
        if not (self._echoes[prompt] or self._echo_logprobs or self._generation_request.options.return_token_ids):
            return None
        first = CompletionChoice(index, self._echoes[prompt], self._echo_logprobs_of(index))
        if self._generation_request.options.return_token_ids:
            first.prompt_token_ids = self._generation_request.prompts[prompt].tolist()
        return first

    def chunks(self, index: int, delta: OutputDelta) -> list[CompletionChoice]:
        return [CompletionChoice(index, delta.text, self._logprobs[index].format_delta(delta))]

    def last_chunk(self, index: int, choice: Choice) -> CompletionChoice:
        return CompletionChoice(index, "", None, choice.client_finish_reason, choice.stop_reason)

    def full_choice(self, index: int, choice: Choice, delta: OutputDelta) -> CompletionChoice:
        prompt = index // self._generation_request.options.n
        logprobs = self._echo_logprobs_of(index, delta) if self._echo_logprobs else self._logprobs[index].format_delta(delta)
        tokens, scores = self._generation_request.prompts[prompt], self._generation_request.get_prompt_logprobs(prompt)
        return CompletionChoice(
            index,
            self._echoes[prompt] + delta.text,
            logprobs,
            choice.client_finish_reason,
            choice.stop_reason,
            prompt_logprobs=format_prompt_logprobs(self._encoder, tokens, scores) if self._prompt_logprobs else None,
            prompt_token_ids=tokens.tolist() if self._generation_request.options.return_token_ids else None,
            token_ids=None,
        )

    def extra_fields(self) -> dict[str, Any]:
        return {}

    def _echo_logprobs_of(self, index: int, delta: OutputDelta | None = None) -> CompletionLogprobs | None:
        """Return the prompt's log-probabilities, followed by those of `delta`."""
        if not self._echo_logprobs:
            return None
        prompt = index // self._generation_request.options.n
        return self._logprobs[index].format_echo(
            self._generation_request.prompts[prompt], self._generation_request.get_prompt_logprobs(prompt), delta
        )


async def completions(worker: Worker, context: RequestContext) -> None:
    """Handle one request."""
    prompt_tokens, body = await read_tokenized_body(worker, context)
    request = parse(body, CompletionRequest, worker.max_model_len)
    model = worker.check_model(request.model)
    with worker.adapters.use(model) as adapter:
        origin = read_origin(context, request.cache_salt, request.priority, request.user)
        options = read_options(request, worker.ready.sampling_defaults, *origin)
        prompts = [prompt_tokens] if prompt_tokens is not None else await _prompts(worker, context, request, options)
        if (constraint := options.constraint) is not None:
            grammar = await context.while_connected(worker.compile_grammar(constraint, options.tenant, context.cpu.add))
            options = replace(options, grammar=grammar)
        generation_request = prepare(worker, prompts, options, adapter)
        formatter = CompletionFormatter(request.request_id or context.request_id, worker, generation_request, request)
        writer = ChunkWriter(worker, request, model, formatter, generation_request)
        await send_answer(context, worker, generation_request, writer, stream=bool(request.stream))


async def _prompts(worker: Worker, context: RequestContext, request: CompletionRequest, options: GenerationOptions) -> "list[array[int]]":
    """Return the token ids of each prompt: one text, several texts, one list of token ids, or several."""
    texts = [text for _, text in list_texts("prompt", request.prompt)]
    if len(texts) * options.best_of > MAX_SEQUENCES:
        raise invalid(
            f"prompt: {len(texts)} prompts times {options.best_of} choices are more than {MAX_SEQUENCES} sequences", param="prompt"
        )
    special, is_cut = request.add_special_tokens is not False, options.truncate_prompt_tokens is not None
    most = worker.max_countable_tokens if is_cut else worker.max_model_len
    # before they are tokenized: a list may take seconds
    worker.check_queue_limit(len(texts) * options.best_of, options.tenant)

    def encode(text: TextOrTokens) -> "array[int]":
        return worker.encoder.encode_text(text, special, options.salt, most) if isinstance(text, str) else array("I", text)

    return await worker.encode_list(encode, texts, [len(text) for text in texts], context.cpu)
