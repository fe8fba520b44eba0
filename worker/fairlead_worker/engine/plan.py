"""A step as data: what the scheduler decided, and what the forward pass brought back. The only thing that both know."""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from fairlead_worker.engine.request import Request
from fairlead_worker.messages import TokenLogprobs


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
    """True when the row ends at the last known token, so that its logits give the next one."""

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(slots=True)
class StepPlan:
    """The work of one forward pass over a packed, mixed batch. Rows that sample come in request (arrival) order."""

    rows: list[Row] = field(default_factory=list)
    prefill_tokens: int = 0
    """Tokens of rows that prefill (prompts, or known tokens again after a retraction)."""
    decodes: int = 0
    """Rows of requests that decode."""
    prefill_work: float = 0.0
    """Positions of the prefilled tokens, summed: what their attention costs."""
    decode_context: int = 0
    """Lengths of the decodes, summed; kept only where the chunk size follows an ITL target."""
    samples: int = 0
    """Rows that sample: the decodes, and prompts that end in this step."""
    number: int = 0
    """Counts the plans with rows, from 1."""

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(slots=True)
class StepResult:
    """Tokens of the rows with `samples`, in plan order: usually one each; several when speculation was accepted."""

    tokens: list[list[int]]
    logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    """Parallel to `tokens`; empty tuples for rows that asked for none. May be empty altogether."""
    seconds: float = 0.0
    """Wall time of the step, measured by the runner."""


class Runner(Protocol):
    """What the loop needs of model execution."""

    def execute(self, plan: StepPlan) -> StepResult: ...
