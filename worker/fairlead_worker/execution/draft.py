"""Draft model: a small model proposes tokens for the large one (Leviathan et al. 2023; Chen et al. 2023). Proposals are greedy.

It keeps its own KV in pages with the same numbers, so the scheduler's page tables serve both models, and the prefix cache is shared as
well. It computes the prompts that the model computes, and decodes only when it drafts; it first catches up on tokens it has not seen.
Its KV can be missing for a cached prefix whose first request was never drafted for. Then its drafts get worse and nothing else: the
model verifies every token.

The passes of a draft follow each other on the device: a drafted token goes into the next pass, and into the verifying one, without the
host. The host packs and plans each pass while the one before it runs, since positions and pages do not depend on tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes, run_step
from fairlead_worker.execution.forward import Forward
from fairlead_worker.execution.pack import pack
from fairlead_worker.kernels.base import Backend, KVSpec, PackedStep
from fairlead_worker.kernels.transfer import to_device, to_host
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.request import Request

CATCH_UP = 512
"""Most tokens that a step catches up on, for all of its requests together. A request that is further behind gets no draft in this step, so
that the other requests do not wait for it. The memory profile includes a pass with as many tokens (`run_largest_draft`)."""


@dataclass(slots=True)
class _Seen:
    """How much of a request has draft KV, since its last admission."""

    request: Request
    preemptions: int
    done: int
    """Leading tokens whose draft KV is in the pages, assuming that the drafted ones were accepted."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens on the device, and their copy on its way to the host."""

    plan: StepPlan
    """Has rows with as many draft tokens as were drafted, all of them 0."""
    _sources: Mapping[int, Sequence[int]]
    """Place in the plan's rows -> the places of its tokens among `_tokens`."""
    _tokens: torch.Tensor
    """[n] int64"""
    _on_host: Callable[[], torch.Tensor]

    def __bool__(self) -> bool:
        """Return whether a token was drafted."""
        return bool(self._sources)

    def fill(self, step: PackedStep) -> PackedStep:
        """Return `step`, which is `plan` packed, with the drafted tokens. The host does not wait for them."""
        at, end = list[int](), 0
        for place, row in enumerate(self.plan.rows):
            at += range(end + 1, end + 1 + len(self._sources.get(place, ())))
            end += row.count
        sources = [source for place in sorted(self._sources) for source in self._sources[place]]
        device = step.tokens.device
        index = to_device(at, device, torch.int64)
        step.tokens.index_copy_(0, index, self._tokens.index_select(0, to_device(sources, device, torch.int64)))
        return replace(step, host=None)

    def read(self) -> StepPlan:
        """Return the plan with its draft tokens. Waits for their copy, but not for work that was queued behind it."""
        if not self:
            return self.plan
        tokens, rows = self._on_host().tolist(), list(self.plan.rows)
        for place, sources in self._sources.items():
            rows[place] = rows[place].with_draft(len(sources), [tokens[source] for source in sources])
        return structs.replace(self.plan, rows=tuple(rows))


class Drafter:
    """Chooses the drafts of a plan."""

    def __init__(self, forward: Forward, loaded: LoadedModel, backend: Backend, vocabulary_size: int) -> None:
        """`forward`: of `loaded` on `backend`. `vocabulary_size`: of the verifying model. Padding may make the two sizes differ although
        the tokenizer is the same.
        """
        self.forwards = 0
        """Forward passes of the latest draft; 0 if there was nothing to draft."""
        self.graphs: GraphedDecodes | None = None
        """CUDA graphs of passes in which every request has one token, mostly those after the first drafted token. None: no graphs."""
        self._forward = forward
        self.loaded = loaded
        self._backend = backend
        self._vocabulary_size = vocabulary_size
        self._seen: dict[str, _Seen] = {}

    @property
    def spec(self) -> KVSpec:
        return self._backend.spec

    def run(self, step: PackedStep, plainly: bool = False) -> torch.Tensor:
        """Return the logits of a pass. `plainly`: without CUDA graphs."""
        return run_step(step, self._forward, self._backend, None if plainly else self.graphs)

    @torch.inference_mode()
    def draft(self, plan: StepPlan) -> Drafts | None:
        """Compute draft KV of the prompts, and draft. A row that still catches up gets no draft; None: there is nothing to compute."""
        self.forwards = 0
        self._seen = {name: seen for name, seen in self._seen.items() if seen.request.finish is None}
        rows, first, drafting, left = list(plan.rows), list[Row](), list[int](), CATCH_UP  # drafting: places in `rows`
        for place, row in enumerate(plan.rows):
            seen = self._state_of(row)
            known = min(row.end, len(row.request.tokens))
            if row.num_drafts:
                count = min(known - seen.done, 1 + left)
                left -= count - 1
                end = seen.done + count
                if end == known:
                    drafting.append(place)
                else:
                    rows[place] = row.with_draft(0)
                first.append(Row(row.request, seen.done, count, row.pages, end == known))
                seen.done = end + row.num_drafts - 1 if end == known else end
            elif row.count > 1:
                first.append(Row(row.request, seen.done, row.end - seen.done, row.pages, False))
                seen.done = row.end
        if not first:
            return None
        tokens = self._choose(first)
        chain, sources = [tokens], {place: [at] for at, place in enumerate(drafting)}
        length, count = 1, len(drafting)
        while more := [at for at, place in enumerate(drafting) if rows[place].num_drafts > length]:
            if len(more) < len(drafting):
                tokens = tokens.index_select(0, to_device(more, tokens.device))
                drafting = [drafting[at] for at in more]
            following = [Row(row.request, row.start + length, 1, row.pages, True, [0]) for row in (rows[place] for place in drafting)]
            tokens = self._choose(following, tokens)
            chain.append(tokens)
            for at, place in enumerate(drafting, count):
                sources[place].append(at)
            length, count = length + 1, count + len(drafting)
        for place, drafted in sources.items():
            rows[place] = rows[place].with_draft(len(drafted), [0] * len(drafted))
        self.forwards = length if sources else 0
        every = torch.cat(chain)
        return Drafts(_with_rows(plan, rows), sources, every, to_host(every) if sources else lambda: every)

    def _state_of(self, row: Row) -> _Seen:
        """Return the draft state of the row's request. Pages from the prefix cache are assumed to have draft KV."""
        request = row.request
        seen = self._seen.get(request.id)
        if seen is None or seen.request is not request or seen.preemptions != request.history.preemptions:
            seen = self._seen[request.id] = _Seen(request, request.history.preemptions, row.start)
        seen.done = min(seen.done, row.start)
        return seen

    def _choose(self, rows: list[Row], drafted: torch.Tensor | None = None) -> torch.Tensor:
        """Return the likeliest next token of each sampling row, [n] int64 on the device, from one forward pass.

        `drafted`: the tokens of these rows if they are drafted ones.
        """
        step = pack(StepPlan(rows, drafted=0 if drafted is None else len(rows)), self._backend.spec.page_size, self.loaded.device)
        step = replace(step, adapters=(), host=None)  # adapters belong to the verifying model
        if drafted is not None:
            step.tokens.copy_(drafted)
        step.tokens.clamp_(max=self.loaded.vocabulary_size - 1)
        logits = self.run(step)
        if not len(step.sampling):
            return step.tokens.new_empty(0)
        return logits[:, : self._vocabulary_size].argmax(1)


def _with_rows(plan: StepPlan, rows: list[Row]) -> StepPlan:
    """Return the plan with these rows, some of which have fewer draft tokens than before."""
    dropped = [(row.start, row.count - new.count) for row, new in zip(plan.rows, rows, strict=True) if row.count > new.count]
    context = sum([count * start for start, count in dropped]) if plan.decode_context else 0  # 0: it was not computed
    drafted = plan.drafted - sum([count for _, count in dropped])
    return structs.replace(plan, rows=tuple(rows), drafted=drafted, decode_context=plan.decode_context - context)
