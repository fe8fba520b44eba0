"""A step as data: what the scheduler decided, and what the forward pass brought back. The only thing that both know."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fairlead_worker.messages import TokenLogprobs
from fairlead_worker.scheduler.request import Request


@dataclass(slots=True, eq=False)
class Row:
    """One request's part of a step: compute `tokens[start : start + count]`, writing KV into `pages`.

    The row of a decode is the same object in every step, moved on by `advance`: read it until then, keep it no longer.
    """

    request: Request
    start: int
    """Tokens already computed; also the position of the first token computed now."""
    count: int
    pages: "array[int]"
    """The request's page table, covering at least `start + count` tokens: token i is in `pages[i // page_size]`, slot `i % page_size`.
    The live table of its lease (`array('i')`): copy it, keep no view of it beyond the packing of the step."""
    samples: bool
    """True when the row ends at the last known token (or behind it, in a draft), so that its logits give the next one. Never of a request
    whose hidden states are pooled."""
    draft: Sequence[int] = ()
    """Guesses at the tokens after the last known one, `count - 1` of them: a decode that speculates. The scheduler's, or left to the
    runner's draft model to fill in. KV of those that prove wrong is overwritten by later steps and read by nobody."""

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def guesses(self) -> int:
        """Tokens behind the last known one that are computed too; until `advance`."""
        return max(0, self.end - len(self.request.tokens))


@dataclass(slots=True)
class StepPlan:
    """The work of one forward pass over a packed, mixed batch. Rows that sample come in request (arrival) order."""

    rows: list[Row] = field(default_factory=list)
    prefill_tokens: int = 0
    """Tokens of rows that prefill (prompts, or known tokens again after a retraction)."""
    decodes: int = 0
    """Rows of requests that decode."""
    excluded_decodes: int = 0
    """Decodes without a row: prompts have this step to themselves."""
    prefill_work: float = 0.0
    """Positions of the prefilled tokens, summed: what their attention costs."""
    decode_context: int = 0
    """Lengths of the decodes, summed; kept only where the chunk size follows an ITL target."""
    samples: int = 0
    """Rows that sample: the decodes, and prompts that end in this step."""
    scores: int = 0
    """Rows of which positions are wanted for prompt log-probabilities (`Request.to_score`)."""
    pools: int = 0
    """Rows of which hidden states are wanted (`Request.to_pool`)."""
    drafted: int = 0
    """Tokens that decodes may guess ahead, in all; 0: no row speculates."""
    number: int = 0
    """Counts the plans with rows, from 1."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    """(device page, host slot): copied to the host tier before anything else, as this step may write into these pages. Each slot once."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """(device page, host slot): copied back after all saves (of which it may read one) and before the forward pass."""

    @property
    def costs(self) -> tuple[float, float, float, float, float]:
        """What its time depends on, as `scheduler/chunk_sizer.py` fits it."""
        return self.prefill_work, self.prefill_tokens, self.decode_context, self.decodes + self.drafted, 1.0

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(slots=True)
class StepResult:
    """Tokens of the rows with `samples`, in plan order: usually one each; several when speculation was accepted; none where the mask of
    a grammar was late, which leaves the row for the next step."""

    tokens: list[list[int]]
    logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    """Parallel to `tokens`; empty tuples for rows that asked for none. May be empty altogether."""
    seconds: float = 0.0
    """Wall time of the step, measured by the runner."""
    prompt_logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    """Parallel to the plan's rows: of the tokens after the positions in `to_score`. Empty altogether where no row has any."""
    draft_seconds: float = 0.0
    """Of it, what a draft model took."""
    draft_forwards: int = 0
    """Forward passes of the draft model in that time."""
    endings: dict[str, str] = field(default_factory=dict)
    """Requests, by id, whose grammar ends behind these tokens: nothing can follow. With the reason where that is a failure, else ""."""
    pooled: Mapping[str, bytes] = field(default_factory=dict)
    """By request id, what the pool of each row with positions in `to_pool` holds now."""


class Runner(Protocol):
    """What the loop needs of model execution."""

    def execute(self, plan: StepPlan) -> StepResult: ...
