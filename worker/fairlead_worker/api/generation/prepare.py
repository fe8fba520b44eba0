"""Build the engine request: the same for completions and chat completions, streamed or whole."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import msgspec

from fairlead_common.protocols.paths import NO_GENERATION
from fairlead_worker.api.answers.completions import CompletionTokensDetails, PromptTokensDetails, Usage
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.generation.bad_words import find_token_sequences
from fairlead_worker.api.generation.choice import Choice
from fairlead_worker.api.generation.sampling import (
    GenerationOptions,
    check_vocabulary,
    derive_seed,
    limit_max_tokens,
    truncate_prompt,
)
from fairlead_worker.api.worker import Worker
from fairlead_worker.ipc.messages import AdapterInfo, Sampling, Submit, TokenLogprobs
from fairlead_worker.parsing.stage import Parser

MAX_LOGPROBS = 1 << 20
"""Of a response: tokens of prompts and outputs times the alternatives of each."""


class CachedTokens(NamedTuple):
    """Cached tokens of prompts."""

    total: int
    from_host: int
    """Those of `total` that came from the host tier."""
    shown: int
    """`total` without those that the index did not show: what a router could predict."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request for the engine. Choice `i` belongs to prompt `i // options.best_of`."""

    prompts: Sequence["array[int]"]
    options: GenerationOptions
    submits: list[Submit]
    choices: list[Choice]

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the request needs log-probabilities of its prompts. The first choice of each prompt brings them."""
        return self.options.sampling.prompt_logprobs is not None

    def get_prompt_logprobs(self, prompt: int) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of a prompt from its second token on."""
        return self.choices[prompt * self.options.best_of].prompt_logprobs

    def awaits_prompt_logprobs(self, index: int) -> bool:
        """Return True if the prompt log-probabilities for choice `index` have not arrived yet."""
        if self.options.sampling.prompt_logprobs is None:
            return False
        best_of = self.options.best_of
        return not self.choices[index // best_of * best_of].tokens

    def select_best(self) -> list[int]:
        """Return the choices to show: the n most likely of each prompt, best first. Without `best_of`, return all in order."""
        n, best_of = self.options.n, self.options.best_of
        if best_of == n:
            return list(range(len(self.choices)))
        groups = (range(at, at + best_of) for at in range(0, len(self.choices), best_of))
        return [index for group in groups for index in sorted(group, key=lambda i: -self.choices[i].mean_logprob)[:n]]

    def usage(self, generated: bool = True) -> Usage:
        """Return the usage of the tokens so far. `generated`: False counts the prompts only."""
        prompt = sum(map(len, self.prompts))
        completion = sum(choice.output_tokens for choice in self.choices) if generated else 0
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(self.count_cached().total),
        )
        if self.choices and self.choices[0].reasoning_tokens is not None:
            reasoning = sum(choice.reasoning_tokens or 0 for choice in self.choices) if generated else 0
            usage.completion_tokens_details = CompletionTokensDetails(reasoning)
        return usage

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities are formatted."""
        return self.needs_prompt_logprobs or bool(self.options.sampling.logprobs)

    def count_finished_tokens(self) -> int:
        """Return the tokens that were computed for finished choices, without cached ones."""
        best_of = self.options.best_of
        finished = [(place, choice) for place, choice in enumerate(self.choices) if choice.finish_reason is not None]
        return sum(len(self.prompts[place // best_of]) - choice.cached_tokens + choice.output_tokens for place, choice in finished)

    def count_cached(self) -> CachedTokens:
        """Count the cached tokens of the prompts.

        Of a prompt's choices, the one with the fewest counts: it has what the cache held before any of the choices ran.
        """
        cached = from_host = hidden = 0
        best_of = self.options.best_of
        for at in range(0, len(self.choices), best_of):
            begun = [choice for choice in self.choices[at : at + best_of] if choice.tokens]
            if begun:
                least = min(begun, key=attrgetter("cached_tokens"))
                cached += least.cached_tokens
                if least.timing is not None:
                    from_host += least.timing.host_cached_tokens
                    hidden += least.timing.hidden_cached_tokens
        return CachedTokens(cached, from_host, cached - hidden)


def prepare(
    worker: Worker,
    prompts: Sequence["array[int]"],
    options: GenerationOptions,
    adapter: AdapterInfo | None = None,
    parsers: Callable[[], Parser | None] = lambda: None,
    field: str = "prompt",
    ends_at_context: bool = False,
) -> GenerationRequest:
    """Check the prompts against the context length and build one message to the engine for each choice.

    `parsers`: creates the parser of each choice. `ends_at_context`: generate up to the end of the context if it has no room for
    `max_tokens`, instead of refusing the request. Raises ApiError 400 that names `field`, the prompts' field.
    """
    base = resolve_sampling(worker, options)
    root = worker.root_of(adapter.digest if adapter else "", options.salt)
    number = adapter.number if adapter else 0
    submits, choices = [], []
    max_model_len, budget = worker.max_model_len, options.thinking_token_budget
    if (kept := options.truncate_prompt_tokens) is not None:
        max_tokens, from_end = options.max_tokens, options.truncates_end
        prompts = [truncate_prompt(prompt, kept, max_tokens, max_model_len, from_end) for prompt in prompts]
    for prompt in prompts:
        worker.check_tokens(prompt, field)
        max_tokens = limit_max_tokens(options.max_tokens, len(prompt), max_model_len, field, ends_at_context)
        tokens = prompt.tobytes()
        thinking = None if budget is None else worker.output_parsers.build_thinking_budget(budget, prompt)
        for choice in range(options.best_of):
            scores = None if choice else base.prompt_logprobs
            seed = derive_seed(options.seed, choice)
            sampling = msgspec.structs.replace(base, max_tokens=max_tokens, seed=seed, prompt_logprobs=scores, thinking=thinking)
            submits.append(Submit("", tokens, sampling, root, options.priority, options.tenant, number, options.grammar))
            visible = worker.output_parsers.visible_special_tokens
            choices.append(Choice(worker.encoder, prompt, options, worker.ready.eos_token_ids, parsers(), visible))
    _check_logprobs(submits)
    return GenerationRequest(prompts, options, submits, choices)


def check_generates(worker: Worker) -> None:
    """Raise ApiError 400 if the model has no language-modelling head."""
    if not worker.ready.generates:
        uses = "it makes embeddings (/v1/embeddings), and no text"
        if worker.ready.classifier is not None:
            uses = "it scores texts (/score, /rerank) or classifies them (/classify)"
        raise invalid(f"this model has no language-modelling head: {uses}", param="model", code=NO_GENERATION)


def resolve_sampling(worker: Worker, options: GenerationOptions) -> Sampling:
    """Return the request's sampling parameters for this model. Raise ApiError 400 if the model cannot apply them."""
    check_generates(worker)
    base = options.sampling
    if options.bad_words:
        words = find_token_sequences(worker.encoder, options.bad_words, worker.ready.vocabulary_size)
        base = msgspec.structs.replace(base, bad_words=words)
    if options.include_special_tokens and not options.spaces_between_special_tokens and worker.encoder.spaces_special_tokens:
        message = "spaces_between_special_tokens: this model's tokenizer puts spaces there; leave it out"
        raise invalid(message, param="spaces_between_special_tokens")
    if options.thinking_token_budget is not None:
        worker.output_parsers.build_thinking_budget(options.thinking_token_budget, array("I"))
    if base.logit_bias or base.allowed_token_ids:
        check_vocabulary(base, worker.encoder.vocabulary_size, worker.ready.eos_token_ids)
    return base


def _check_logprobs(submits: Sequence[Submit]) -> None:
    """Raise ApiError 400 for too many log-probabilities. A response is held in memory: twenty per token for 128 choices are gigabytes."""
    entries = 0
    for submit in submits:
        sampling = submit.sampling
        entries += 0 if sampling.logprobs is None else sampling.max_tokens * (sampling.logprobs + 1)
        entries += 0 if sampling.prompt_logprobs is None else len(submit.tokens) // 4 * (sampling.prompt_logprobs + 1)
    if entries > MAX_LOGPROBS:
        message = f"logprobs: up to {entries} for all tokens together, and at most {MAX_LOGPROBS} are returned"
        raise invalid(f"{message}; lower max_tokens, n, or the number of log-probabilities per token", param="logprobs")
