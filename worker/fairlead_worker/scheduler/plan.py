"""The plan and the result of a step: the interface between the scheduler and model execution."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct

from fairlead_worker.cache.states import RowState
from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.scheduler.request import Request


class Row(Struct, frozen=True, eq=False, gc=False):
    """One request's part of a step: compute `tokens[start : start + count]`, writing KV into `pages`."""

    request: Request
    start: int
    """Tokens already computed; also the position of the first token computed now."""
    count: int
    pages: "array[int]"
    """The request's page table, covering at least `start + count` tokens: token i is in `pages[i // page_size]`, slot `i % page_size`.
    The live table of its lease (`array('i')`): copy it, keep no view of it beyond the packing of the step."""
    samples: bool
    """Whether the row ends at the last known token (or behind it, in a draft), so that its logits give the next one. Never true for
    pooling requests."""
    draft: Sequence[int] = ()
    """Draft tokens after the last known one, `count - 1` of them, in a speculating decode; empty until the runner's draft model has chosen
    them. Later steps overwrite the KV of rejected ones, and no row reads it before."""
    state: RowState | None = None
    """Where its recurrent states are; None: the model has none, or the row is of a warm-up, which starts from zeros and keeps none."""

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens after the last known token, chosen or not yet. Valid until `advance`."""
        return max(0, self.end - self.request.length)

    def with_draft(self, count: int, draft: Sequence[int] = ()) -> "Row":
        """Return a row that verifies `count` draft tokens after the last known one."""
        return Row(self.request, self.start, 1 + count, self.pages, self.samples, draft, self.state)


class StepPlan(Struct, frozen=True, eq=False):
    """The work of one forward pass over a packed, mixed batch. Decodes come first, then prompts, both in arrival order.

    A change is a new plan (`msgspec.structs.replace`). A frozen dataclass took 2.5 microseconds to create in each step, this takes 0.7.
    """

    rows: Sequence[Row] = ()
    prefill_tokens: int = 0
    """Tokens of prefill rows: prompts, or known tokens again after a preemption."""
    decodes: int = 0
    """Number of decode rows."""
    excluded_decodes: int = 0
    """Decodes without a row in this step, because it holds prompts only."""
    prefill_work: float = 0.0
    """Positions of the prefilled tokens, summed: what their attention costs."""
    decode_context: int = 0
    """Lengths of the decodes, summed; computed only if the chunk size follows an ITL target."""
    samples: int = 0
    """Rows that sample: the decodes, and prompts that end in this step."""
    scores: int = 0
    """Rows with positions for prompt logprobs (`Request.to_score`)."""
    pools: int = 0
    """Rows with hidden states to pool (`Request.to_pool`)."""
    drafted: int = 0
    """Draft tokens of all rows; 0: no row speculates."""
    number: int = 0
    """Serial number among plans with rows, from 1."""
    saves: Sequence[tuple[int, int]] = ()
    """(device page, host slot): copied to the host tier first, because this step may write to these pages. Each slot occurs once."""
    loads: Sequence[tuple[int, int]] = ()
    """(device page, host slot): copied back after all saves, as it may read a saved slot, and before the forward pass."""

    @property
    def costs(self) -> tuple[float, float, float, float, float]:
        """The terms of the step time that `scheduler/chunk_sizer.py` fits."""
        return self.prefill_work, self.prefill_tokens, self.decode_context, self.decodes + self.drafted, 1.0

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(slots=True)
class StepResult:
    """The result of one step.

    `tokens` belongs to the sampling rows, in plan order. A row usually has one token, several if drafts were accepted, and none if its
    grammar mask was late: it then runs again in the next step.
    """

    tokens: list[list[int]]
    logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    """Parallel to `tokens`; empty tuples for rows without logprobs. The list is empty if no row has any."""
    seconds: float = 0.0
    """Wall time of the step, measured by the runner."""
    prompt_logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    """Parallel to the plan's rows: logprobs of the tokens after the positions in `to_score`. The list is empty if no row has any."""
    draft_seconds: float = 0.0
    """Part of `seconds` that the draft model took."""
    draft_forwards: int = 0
    """Forward passes of the draft model in that time."""
    endings: dict[str, str] = field(default_factory=dict)
    """By request id: grammars that end after these tokens. The value is the reason of a failure, else ""."""
    pooled: Mapping[str, bytes] = field(default_factory=dict)
    """By request id: the new pool content of each row with positions in `to_pool`."""
    executed: StepPlan | None = None
    """The plan with the tokens of the draft model; None: the plan ran as it was given."""


class Runner(Protocol):
    """Executes plans on the model."""

    def execute(self, plan: StepPlan) -> StepResult: ...
