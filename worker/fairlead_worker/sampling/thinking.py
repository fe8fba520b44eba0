"""Thinking budgets: a request's reasoning ends after a number of tokens, because its end marker is then forced token by token.

The forced token is a function of the request's tokens alone, so batches, preemption, drafts and overlapped steps do not change it. Where
nothing is forced, the choice is the one without a budget.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from fairlead_worker.ipc.messages import ThinkingBudget
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.scheduler.request import Request


class Phase(Enum):
    """Where an output is."""

    BEFORE = "before"
    """Only blank tokens and a part of the start marker so far."""
    INSIDE = "inside"
    AFTER = "after"
    """The reasoning has ended, or the output began with something else."""


@dataclass(frozen=True, slots=True)
class Position:
    """The state of one output after some tokens."""

    phase: Phase
    count: int = 0
    """Tokens of the reasoning, those of its prompt included."""
    matched: int = 0
    """Leading tokens of the next marker with which the output ends."""


def begin(budget: ThinkingBudget) -> Position:
    """Return the position before the first output token."""
    return Position(Phase.BEFORE) if budget.used is None else Position(Phase.INSIDE, budget.used)


def advance(budget: ThinkingBudget, position: Position, token: int) -> Position:
    """Return the position after one more token."""
    count, matched = position.count, position.matched
    match position.phase:
        case Phase.BEFORE if token == budget.start[matched]:
            return Position(Phase.INSIDE) if matched + 1 == len(budget.start) else Position(Phase.BEFORE, 0, matched + 1)
        case Phase.BEFORE if not matched and token in budget.blank:
            return position
        case Phase.INSIDE:
            matched = _count_matched(budget.end, (*budget.end[:matched], token))
            return Position(Phase.AFTER) if matched == len(budget.end) else Position(Phase.INSIDE, count + 1, matched)
    return Position(Phase.AFTER)


def forced_token(budget: ThinkingBudget, position: Position) -> int | None:
    """Return the token that must come next; None: any. An end marker that the model has begun is completed, not repeated."""
    return budget.end[position.matched] if position.phase is Phase.INSIDE and position.count >= budget.tokens else None


def _count_matched(marker: Sequence[int], tail: Sequence[int]) -> int:
    """Return the length of the longest start of `marker` with which `tail` ends."""
    return next((n for n in range(min(len(marker), len(tail)), 0, -1) if tuple(marker[:n]) == tuple(tail[-n:])), 0)


class _Tracker:
    """The position of one request, which follows its tokens."""

    def __init__(self, request: Request, budget: ThinkingBudget) -> None:
        self.tokens: array[int] = request.tokens
        """The request's own array, which only grows."""
        self.budget, self.position = budget, begin(budget)
        self._seen = request.prompt_length

    def next_token(self, draft: Sequence[int]) -> int | None:
        """Return the forced token after the request's tokens and a draft."""
        while self._seen < len(self.tokens) and self.position.phase is not Phase.AFTER:
            self.position = advance(self.budget, self.position, self.tokens[self._seen])
            self._seen += 1
        position = self.position
        for token in draft:
            position = advance(self.budget, position, token)
        return forced_token(self.budget, position)


def force(tokens: torch.Tensor, requests: Sequence[Request], ahead: Sequence[Sequence[int]] = ()) -> torch.Tensor:
    """Return chosen tokens [rows] int64 with forced ones in their places. `ahead`: as in `sampler.sample`."""
    rows = [(i, request, budget) for i, request in enumerate(requests) if (budget := request.sampling.thinking) is not None]
    if not rows:
        return tokens
    next_tokens = ((i, _tracker(request, budget).next_token(ahead[i] if ahead else ())) for i, request, budget in rows)
    forced = [(i, token) for i, token in next_tokens if token is not None]
    if not forced:
        return tokens
    places, values = to_device(torch.tensor(forced).T, tokens.device)
    return tokens.index_copy(0, places, values)


def _tracker(request: Request, budget: ThinkingBudget) -> _Tracker:
    tracker: _Tracker | None = request.sampler_state.get("thinking")
    if tracker is None:
        tracker = request.sampler_state["thinking"] = _Tracker(request, budget)
    return tracker
