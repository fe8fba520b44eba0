"""Draft model: a small model proposes tokens for the large one (Leviathan et al. 2023; Chen et al. 2023). Proposals are greedy.

It keeps its own KV in pages with the same numbers, so the scheduler's page tables serve both models, and the prefix cache is shared as
well. It computes the prompts that the model computes, and decodes only when it drafts; it first catches up on tokens it has not seen.
Its KV can be missing for a cached prefix whose first request was never drafted for. Then its drafts get worse and nothing else: the
model verifies every token.
"""

from dataclasses import dataclass, replace

import torch
from msgspec import structs

from fairlead_worker.execution.forward import Forward
from fairlead_worker.execution.graphs import GraphedDecodes, run_step
from fairlead_worker.execution.pack import pack
from fairlead_worker.kernels.base import Backend
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
        self._loaded = loaded
        self._backend = backend
        self._vocabulary_size = vocabulary_size
        self._seen: dict[str, _Seen] = {}

    @torch.inference_mode()
    def draft(self, plan: StepPlan) -> StepPlan:
        """Compute draft KV of the prompts, and return the plan with drafts. A row that still catches up gets none."""
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
            return plan
        drafts = {place: [token] for place, token in zip(drafting, self._choose(first), strict=True)}
        length = 1
        while more := [(rows[place], draft) for place, draft in drafts.items() if rows[place].num_drafts > length]:
            following = [Row(row.request, row.start + length, 1, row.pages, True, draft[-1:]) for row, draft in more]
            chosen = self._choose(following, len(following))
            for (_, draft), token in zip(more, chosen, strict=True):
                draft.append(token)
            length += 1
        for place, draft in drafts.items():
            rows[place] = rows[place].with_draft(len(draft), draft)
        self.forwards = length if drafts else 0
        return _with_rows(plan, rows)

    def _state_of(self, row: Row) -> _Seen:
        """Return the draft state of the row's request. Pages from the prefix cache are assumed to have draft KV."""
        request = row.request
        seen = self._seen.get(request.id)
        if seen is None or seen.request is not request or seen.preemptions != request.history.preemptions:
            seen = self._seen[request.id] = _Seen(request, request.history.preemptions, row.start)
        seen.done = min(seen.done, row.start)
        return seen

    def _choose(self, rows: list[Row], drafted: int = 0) -> list[int]:
        """Return the likeliest next token of each sampling row, from one forward pass. `drafted`: drafted tokens among these rows."""
        step = pack(StepPlan(rows, drafted=drafted), self._backend.spec.page_size, self._loaded.device)
        step = replace(step, adapters=())  # adapters belong to the verifying model
        step.tokens.clamp_(max=self._loaded.vocabulary_size - 1)
        logits = run_step(step, self._forward, self._backend, self.graphs)
        tokens: list[int] = logits[:, : self._vocabulary_size].argmax(1).tolist() if len(step.sampling) else []
        return tokens


def _with_rows(plan: StepPlan, rows: list[Row]) -> StepPlan:
    """Return the plan with these rows, some of which have fewer draft tokens than before."""
    dropped = [(row.start, row.count - new.count) for row, new in zip(plan.rows, rows, strict=True) if row.count > new.count]
    context = sum([count * start for start, count in dropped]) if plan.decode_context else 0  # 0: it was not computed
    drafted = plan.drafted - sum([count for _, count in dropped])
    return structs.replace(plan, rows=tuple(rows), drafted=drafted, decode_context=plan.decode_context - context)
