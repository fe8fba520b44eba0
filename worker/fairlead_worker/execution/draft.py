"""A draft model: a small model guesses what the large one will say (Leviathan et al. 2023; Chen et al. 2023). Guesses are greedy.

It keeps KV of its own in pages of the same numbers, so the scheduler's tables serve both, and what the prefix cache shares is shared
here too. It computes the prompts that the model computes, and decodes only when it is asked to guess; what it has not seen by then it
catches up on first. Where its KV is missing all the same (a prefix whose first request was never guessed at), guesses get worse and
nothing else: the model verifies all of them.
"""

from dataclasses import dataclass, replace

import torch

from fairlead_worker.execution.forward import Forward
from fairlead_worker.execution.graphs import GraphedDecodes, run_step
from fairlead_worker.execution.pack import pack
from fairlead_worker.kernels.base import Backend
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.request import Request

CATCH_UP = 512
"""Tokens of one request that a step catches up on at most: a request that was not guessed at for long is not guessed at for some steps
more, rather than everybody waiting for it."""


@dataclass(slots=True)
class _Seen:
    """How much of a request has draft KV, as of one admission."""

    request: Request
    preemptions: int
    done: int
    """Leading tokens whose draft KV is in its pages, if those were accepted that had been guessed."""


class Drafter:
    """Fills in the drafts of a plan."""

    def __init__(self, forward: Forward, loaded: LoadedModel, backend: Backend, vocabulary_size: int) -> None:
        """`forward`: of `loaded` on `backend`. `vocabulary_size`: of the model that verifies. Padding may make the two differ, with one
        tokenizer."""
        self.forwards = 0
        """Passes that the latest draft took; 0 where nothing was to be guessed."""
        self.graphs: GraphedDecodes | None = None
        """Of passes in which every request has one token: those behind the first guess, mostly. None: there are none."""
        self._forward = forward
        self._loaded = loaded
        self._backend = backend
        self._vocabulary_size = vocabulary_size
        self._seen: dict[str, _Seen] = {}

    @torch.inference_mode()
    def draft(self, plan: StepPlan) -> None:
        """Compute draft KV of the prompts, and set `draft` of the rows that have guesses to make; a row still behind gets none."""
        self.forwards = 0
        self._seen = {name: seen for name, seen in self._seen.items() if seen.request.finish is None}
        first: list[Row] = []
        guessing: list[Row] = []
        for row in plan.rows:
            seen = self._of(row)
            known = min(row.end, len(row.request.tokens))
            if row.guesses:
                end = min(known, seen.done + CATCH_UP)
                if end == known:
                    guessing.append(row)
                else:
                    plan.drafted -= row.guesses
                    plan.decode_context -= row.guesses * row.start
                    row.count = 1
                first.append(Row(row.request, seen.done, end - seen.done, row.pages, end == known))
                seen.done = end + row.guesses - 1 if end == known else end
            elif row.count > 1:
                first.append(Row(row.request, seen.done, row.end - seen.done, row.pages, False))
                seen.done = row.end
        if not first:
            return
        tokens = self._choose(first)
        drafts = [[token] for token in tokens]
        place = 1
        while more := [(row, draft) for row, draft in zip(guessing, drafts, strict=True) if row.guesses > place]:
            guesses = [Row(row.request, row.start + place, 1, row.pages, True, draft[-1:]) for row, draft in more]
            chosen = self._choose(guesses, len(guesses))
            for (_, draft), token in zip(more, chosen, strict=True):
                draft.append(token)
            place += 1
        for row, draft in zip(guessing, drafts, strict=True):
            row.draft = draft
        self.forwards = place if guessing else 0

    def _of(self, row: Row) -> _Seen:
        """What is known of its request. Of pages that came from the prefix cache it is taken for granted that they have draft KV."""
        request = row.request
        seen = self._seen.get(request.id)
        if seen is None or seen.request is not request or seen.preemptions != request.preemptions:
            seen = self._seen[request.id] = _Seen(request, request.preemptions, row.start)
        seen.done = min(seen.done, row.start)
        return seen

    def _choose(self, rows: list[Row], drafted: int = 0) -> list[int]:
        """The likeliest next token of each row that samples, from one forward pass. `drafted`: tokens in these rows that are guesses."""
        step = pack(StepPlan(rows, drafted=drafted), self._backend.spec.page_size, self._loaded.device)
        step = replace(step, adapters=())  # they are the other model's
        step.tokens.clamp_(max=self._loaded.vocabulary_size - 1)
        logits = run_step(step, self._forward, self._backend, self.graphs)
        tokens: list[int] = logits[:, : self._vocabulary_size].argmax(1).tolist() if len(step.sampling) else []
        return tokens
