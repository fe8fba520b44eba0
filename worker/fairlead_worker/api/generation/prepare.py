"""A request made ready for the engine: the same for both endpoints, streamed or whole."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fairlead_common.protocols.paths import NO_GENERATION
from fairlead_index.hashing import prompt_root
from fairlead_worker.api.engine.client import Submission
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.generation.bad_words import token_sequences
from fairlead_worker.api.generation.choice import Choice
from fairlead_worker.api.generation.sampling import Show, Wanted, check_vocabulary, choice_seed, fit, truncated
from fairlead_worker.api.worker import Worker
from fairlead_worker.messages import AdapterInfo, Sampling, TokenLogprobs
from fairlead_worker.parsing.events import AnswerParser


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the engine is asked for. Choice `i` belongs to prompt `i // best_of`."""

    prompts: Sequence["array[int]"]
    n: int
    best_of: int
    submissions: list[Submission]
    choices: list[Choice]
    scored: bool
    """Log-probabilities of the prompts are wanted: the first choice of each brings them."""
    show: Show = field(default_factory=Show)

    def scores(self, prompt: int) -> tuple[TokenLogprobs, ...]:
        """Of the second token of a prompt and all after it."""
        return self.choices[prompt * self.best_of].prompt_logprobs

    def awaits_scores(self, index: int) -> bool:
        """The prompt of choice `index` is still to be scored."""
        return self.scored and not self.choices[index // self.best_of * self.best_of].tokens

    def best(self) -> list[int]:
        """The choices to show: of each prompt the n most likely ones, the likeliest first; all in their order where all are shown."""
        if self.best_of == self.n:
            return list(range(len(self.choices)))
        groups = (range(at, at + self.best_of) for at in range(0, len(self.choices), self.best_of))
        return [index for group in groups for index in sorted(group, key=lambda i: -self.choices[i].mean_logprob)[: self.n]]

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        prompt = sum(map(len, self.prompts))
        completion = sum(choice.generated for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self._leaders())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.choices and self.choices[0].reasoning_tokens is not None:
            reasoning = sum(choice.reasoning_tokens or 0 for choice in self.choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def host_cached_tokens(self) -> int:
        """Of the cached tokens, those that came back from the host tier."""
        return sum(choice.timing.host_cached_tokens for choice in self._leaders() if choice.timing is not None)

    def _leaders(self) -> Iterator[Choice]:
        """Of several choices of one prompt, the one that found least in the cache: it says what was cached before them all."""
        for at in range(0, len(self.choices), self.best_of):
            begun = [choice for choice in self.choices[at : at + self.best_of] if choice.tokens]
            if begun:
                yield min(begun, key=lambda choice: choice.cached_tokens)


def prepare(
    worker: Worker,
    prompts: Sequence["array[int]"],
    wanted: Wanted,
    adapter: AdapterInfo | None = None,
    grammar: str = "",
    parsers: Callable[[], AnswerParser | None] = lambda: None,
    field: str = "prompt",
) -> Prepared:
    """Check the prompts against the context and make a submission for each choice. Raises ApiError 400, for `field`, the prompts' own.

    `grammar`: what `Worker.grammar` says of the form that is wanted. `parsers`: one for each choice, where their text is to be read.
    """
    base = checked_sampling(worker, wanted)
    # An adapter's prefixes are not told to peers: they would compute them with the bare model.
    root = prompt_root(worker.encoder.format, adapter.digest, wanted.salt) if adapter else worker.plain_root(wanted.salt)
    number = adapter.number if adapter else 0
    submissions, choices = [], []
    prompts = [truncated(prompt, wanted.truncate, wanted.max_tokens, worker.max_model_len) for prompt in prompts]
    for prompt in prompts:
        worker.check_tokens(prompt, field)
        max_tokens = fit(wanted.max_tokens, len(prompt), worker.max_model_len, field)
        for choice in range(wanted.best_of):
            scores = None if choice else base.prompt_logprobs
            seed = choice_seed(wanted.seed, choice)
            sampling = msgspec.structs.replace(base, max_tokens=max_tokens, seed=seed, prompt_logprobs=scores)
            submissions.append(Submission(prompt, sampling, root, wanted.priority, wanted.tenant, number, grammar))
            choices.append(
                Choice(
                    worker.encoder,
                    prompt,
                    stops=wanted.stops,
                    min_tokens=base.min_tokens,
                    eos=worker.ready.eos_token_ids,
                    logprobs=wanted.logprobs,
                    silent=wanted.silent,
                    parser=parsers(),
                    shown=worker.reading.shown,
                    special_tokens=wanted.show.special_tokens,
                    show_stop=wanted.show.stop,
                )
            )
    _check_logprobs(submissions, worker.config.max_logprob_entries)
    return Prepared(prompts, wanted.n, wanted.best_of, submissions, choices, base.prompt_logprobs is not None, wanted.show)


def checked_sampling(worker: Worker, wanted: Wanted) -> Sampling:
    """`wanted.base` as this model can do it. Raises ApiError 400."""
    if not worker.ready.generates:
        message = "this model has no language-modelling head: it makes embeddings (/v1/embeddings), and no text"
        raise invalid(message, param="model", code=NO_GENERATION)
    base = wanted.base
    if wanted.bad_words:
        base = msgspec.structs.replace(base, bad_words=token_sequences(worker.encoder, wanted.bad_words, worker.ready.vocabulary_size))
    if wanted.show.special_tokens and not wanted.show.spaces and worker.encoder.spaces_special_tokens:
        message = "spaces_between_special_tokens: this model's tokenizer puts spaces there; leave it out"
        raise invalid(message, param="spaces_between_special_tokens")
    check_vocabulary(base, worker.encoder.vocabulary_size, worker.ready.eos_token_ids)
    return base


def _check_logprobs(submissions: Sequence[Submission], most: int) -> None:
    """An answer with its log-probabilities is held as a whole: twenty for each token of 128 choices would be gigabytes."""
    entries = 0
    for submission in submissions:
        sampling = submission.sampling
        entries += 0 if sampling.logprobs is None else sampling.max_tokens * (sampling.logprobs + 1)
        entries += 0 if sampling.prompt_logprobs is None else len(submission.tokens) * (sampling.prompt_logprobs + 1)
    if entries > most > 0:
        message = f"logprobs: up to {entries} for all tokens together, and at most {most} are told (--max-logprob-entries)"
        raise invalid(f"{message}; lower max_tokens, n, or how many of each token are asked for", param="logprobs")
