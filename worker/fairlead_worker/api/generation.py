"""A request made ready for the engine, and its way through it: the same for both endpoints, streamed or whole."""

import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fairlead_worker.api.choice import Choice, Piece, SequenceFailed
from fairlead_worker.api.engine_client import Generation, Submission
from fairlead_worker.api.errors import failed
from fairlead_worker.api.sampling import Wanted, check_vocabulary, choice_seed, fit
from fairlead_worker.api.worker import Worker


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the engine is asked for. Choice `i` belongs to prompt `i // best_of`."""

    prompts: Sequence["array[int]"]
    n: int
    best_of: int
    submissions: list[Submission]
    choices: list[Choice]

    def best(self) -> list[int]:
        """The choices to show: of each prompt the n most likely ones, the likeliest first; all in their order where all are shown."""
        if self.best_of == self.n:
            return list(range(len(self.choices)))
        groups = (range(at, at + self.best_of) for at in range(0, len(self.choices), self.best_of))
        return [index for group in groups for index in sorted(group, key=lambda i: -self.choices[i].mean_logprob)[: self.n]]

    def usage(self) -> dict[str, Any]:
        """Tokens so far. Of several choices of one prompt, the one that found least in the cache says what was cached before it."""
        prompt = sum(map(len, self.prompts))
        completion = sum(choice.tokens for choice in self.choices)
        groups = (self.choices[at : at + self.best_of] for at in range(0, len(self.choices), self.best_of))
        cached = sum(min((choice.cached_tokens for choice in group if choice.tokens), default=0) for group in groups)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def prepare(worker: Worker, prompts: Sequence["array[int]"], wanted: Wanted) -> Prepared:
    """Check the prompts against the context and make a submission for each choice. Raises ApiError 400."""
    root = worker.encoder.format.root()
    check_vocabulary(wanted.base, worker.encoder.vocabulary_size, worker.ready.eos_token_ids)
    submissions, choices = [], []
    for prompt in prompts:
        worker.check_tokens(prompt)
        max_tokens = fit(wanted.max_tokens, len(prompt), worker.max_model_len)
        for choice in range(wanted.best_of):
            sampling = msgspec.structs.replace(wanted.base, max_tokens=max_tokens, seed=choice_seed(wanted.seed, choice))
            submissions.append(Submission(prompt, sampling, root))
            choices.append(
                Choice(
                    worker.encoder,
                    prompt,
                    stops=wanted.stops,
                    min_tokens=wanted.base.min_tokens,
                    eos=worker.ready.eos_token_ids,
                    logprobs=wanted.logprobs,
                )
            )
    return Prepared(prompts, wanted.n, wanted.best_of, submissions, choices)


@dataclass(slots=True)
class Run:
    """One pass of a prepared request through the engine, timed for the metrics."""

    worker: Worker
    prepared: Prepared
    began: float = field(default_factory=time.monotonic)
    _last: dict[int, float] = field(default_factory=dict)

    async def pieces(self, generation: Generation) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Batches of (choice, piece). Raises EngineGone, or ApiError where the engine gave a sequence up."""
        metrics, choices = self.worker.metrics, self.prepared.choices
        async for batch in generation.outputs():
            now = time.monotonic()
            pieces = []
            for index, output in batch:
                choice = choices[index]
                if choice.finish_reason is not None:  # a stop string was met earlier in this batch
                    continue
                self._time(index, now)
                try:
                    pieces.append((index, choice.take(output)))
                except SequenceFailed as error:
                    metrics.finished("error")
                    raise failed(str(error)) from error
                if choice.finish_reason is not None:
                    metrics.finished(choice.finish_reason)
                    metrics.whole_request.observe(now - self.began)
                    if output.finish is None:
                        generation.abort(index)
            if pieces:
                yield pieces

    def gone(self) -> None:
        """The client left before the end."""
        for choice in self.prepared.choices:
            if choice.finish_reason is None:
                self.worker.metrics.finished("abort")

    def _time(self, index: int, now: float) -> None:
        if not self._last:
            self.worker.metrics.first_token.observe(now - self.began)
        if index in self._last:
            self.worker.metrics.token_gap.observe(now - self._last[index])
        self._last[index] = now
