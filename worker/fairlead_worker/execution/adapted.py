"""Steps that mix requests with and without LoRA adapters: one pass if the model runs layer by layer, else one pass for each kind of row.

The native decoder does not support adapters. Rows without an adapter always use it, and the others always run layer by layer, because
a row's bits must not depend on the batch. The prefix cache keeps the two kinds apart, so no row reads KV that the other pass stores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from fairlead_worker.execution.forward import Forward, HiddenStates
from fairlead_worker.kernels.base import Backend, GroupPages, PackedStep, StepContext
from fairlead_worker.lora.adapters import AdapterSet


class AdaptedForward:
    """Implements `execution.forward.Forward`."""

    def __init__(self, plain: Forward, modules: Forward, adapters: AdapterSet, backend: Backend) -> None:
        """`plain`: for rows without an adapter. `modules`: of the model that `adapters` belong to; may be the same object."""
        self.plain = plain
        self._modules, self._adapters, self._backend = modules, adapters, backend
        self.can_score = plain.can_score and modules.can_score

    def __call__(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        """Return logits [S, vocabulary]."""
        if not step.adapters:
            return self.plain(step, context)
        if self.plain is self._modules:
            return self._run_adapted(step, context)
        parts = self._parts(step)
        answers = [self._run(part) for part in parts]
        return _merge([part.sampled for part in parts], answers)

    def score(self, step: PackedStep, context: StepContext, places: torch.Tensor) -> tuple[torch.Tensor, HiddenStates]:
        """Return the same logits, and the model's results at `places`."""
        if not step.adapters:
            return self.plain.score(step, context, places)
        if self.plain is self._modules:
            with self._adapters.activate(step.adapters, step.counts):
                return self._modules.score(step, context, places)
        parts = self._parts(step)
        inside = [torch.isin(places, part.tokens).nonzero()[:, 0] for part in parts]
        scored = [self._score(part, places[mine]) for part, mine in zip(parts, inside, strict=True)]
        logits = _merge([part.sampled for part in parts], [answer for answer, _ in scored])
        return logits, _MergedStates(len(places), inside, [seen for _, seen in scored])

    def _run_adapted(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        with self._adapters.activate(step.adapters, step.counts):
            return self._modules(step, context)

    def _run(self, part: "Part") -> torch.Tensor:
        run = self._run_adapted if part.step.adapters else self.plain
        return run(part.step, self._backend.plan(part.step))

    def _score(self, part: "Part", places: torch.Tensor) -> tuple[torch.Tensor, HiddenStates]:
        local = torch.searchsorted(part.tokens, places)
        context = self._backend.plan(part.step)
        if not part.step.adapters:
            return self.plain.score(part.step, context, local)
        with self._adapters.activate(part.step.adapters, part.step.counts):
            return self._modules.score(part.step, context, local)

    @staticmethod
    def _parts(step: PackedStep) -> "list[Part]":
        """Split `step` into rows without an adapter and rows with one."""
        kinds = ([row for row, adapter in enumerate(step.adapters) if bool(adapter) is kind] for kind in (False, True))
        return [take_rows(step, rows) for rows in kinds if rows]


@dataclass(frozen=True, slots=True)
class _MergedStates:
    """Implements `HiddenStates` over the results of the parts."""

    count: int
    inside: Sequence[torch.Tensor]
    """For each part: the indices of its places among all places, [n] int64, ascending."""
    seen: Sequence[HiddenStates]

    def logits(self, some: slice) -> torch.Tensor:
        return self._merge(some, lambda seen, own: seen.logits(own))

    def states(self, some: slice) -> torch.Tensor:
        return self._merge(some, lambda seen, own: seen.states(own))

    def _merge(self, some: slice, take: Callable[[HiddenStates, slice], torch.Tensor]) -> torch.Tensor:
        begin, end, _ = some.indices(self.count)
        # The places of each part are ordered, so a range of all places is a range of each part's places.
        local = [slice(*torch.searchsorted(mine, torch.tensor([begin, end])).tolist()) for mine in self.inside]
        return _merge(
            [mine[own] - begin for mine, own in zip(self.inside, local, strict=True)],
            [take(seen, own) for seen, own in zip(self.seen, local, strict=True)],
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a step as a step of their own."""

    step: PackedStep
    tokens: torch.Tensor
    """[t] int64: the indices of its tokens in the whole step, ascending."""
    sampled: torch.Tensor
    """[s] int64: the indices of its positions among the whole step's sampled ones, ascending."""


def take_rows(step: PackedStep, rows: Sequence[int]) -> Part:
    """Return `rows` (ascending, at least one) as a step of their own."""
    begins = list(accumulate(step.counts, initial=0))
    tokens = torch.cat([torch.arange(begins[row], begins[row + 1]) for row in rows])
    pages = [each.tables() for each in step.of_groups()]
    chosen = [[tables[row] for row in rows] for tables in pages]
    first, *others = (GroupPages(each.slots[tokens], torch.cat(tables)) for each, tables in zip(step.of_groups(), chosen, strict=True))
    sampled = torch.isin(step.sampling, tokens).nonzero()[:, 0]
    adapters = [step.adapters[row] for row in rows] if step.adapters else []
    part = PackedStep(
        tokens=step.tokens[tokens],
        positions=step.positions[tokens],
        slots=first.slots,
        starts=[step.starts[row] for row in rows],
        counts=[step.counts[row] for row in rows],
        page_indptr=torch.tensor([0, *accumulate(map(len, chosen[0]))], dtype=torch.int32),
        page_indices=first.page_indices,
        sampling=torch.searchsorted(tokens, step.sampling[sampled]),
        adapters=adapters if any(adapters) else (),
        others=others,
    )
    return Part(part, tokens, sampled)


def _merge(places: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Merge [n, width] of each part into one tensor, each row at its place."""
    whole = answers[0].new_empty(sum(map(len, places)), answers[0].shape[1])
    for where, answer in zip(places, answers, strict=True):
        whole[where] = answer.to(whole.dtype)
    return whole
