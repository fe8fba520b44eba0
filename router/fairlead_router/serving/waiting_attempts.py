"""The rule of withdrawal: which requests that wait at their workers would start earlier elsewhere. Pure: no clock.

`fairlead simulate` runs the same code.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from fairlead_index.score import ITL_STEPS, PRIOR_RATE, ScoredWorker, StartEstimate
from fairlead_router.fleet.workers import Worker
from fairlead_router.routing.local_fallback import score_locally
from fairlead_router.routing.policies import RoutingRequest

CHECK_SECONDS = 0.1
EXAMINED = 64
"""Attempts whose remaining wait a check computes. With more of them, the next check continues."""
RANKED = 2
"""Attempts of a check, those with the longest remaining wait, for which other workers are scored."""
LEAST_RATIO = 2.0
"""A request moves if its remaining time here is this many times that elsewhere. Estimates are noisy, the check chooses the largest gain,
and a moved prompt is computed again. In the simulator smaller gains raise the mean (docs/design/router/withdrawal.md)."""


@dataclass(slots=True, eq=False)
class WaitingAttempt:
    """A request that was sent to a worker and has no answer yet."""

    request: RoutingRequest
    worker: Worker
    tokens: float
    """Its own prompt tokens to compute."""
    ahead: float
    """Tokens at the worker when it was sent, its own included."""
    sent_at: float
    name: str = ""
    """`X-Fairlead-Attempt`."""
    was_asked: bool = False
    """The worker was asked to let it go. It is not asked again."""


class WaitingAttempts:
    """The attempts of one router without an answer."""

    def __init__(self) -> None:
        self._attempts: dict[WaitingAttempt, None] = {}
        self._at_worker: dict[Worker, dict[WaitingAttempt, None]] = {}
        self._offset = 0

    def __contains__(self, attempt: WaitingAttempt) -> bool:
        return attempt in self._attempts

    def __len__(self) -> int:
        return len(self._attempts)

    def add(self, request: RoutingRequest, worker: Worker, tokens: float, now: float, name: str = "") -> WaitingAttempt:
        """Record an attempt. `tokens`: already counted as pending at the worker."""
        known = score_locally(worker, 1, now)
        attempt = WaitingAttempt(request, worker, tokens, known.backlog + known.reserved_tokens, now, name)
        self._attempts[attempt] = None
        self._at_worker.setdefault(worker, {})[attempt] = None
        return attempt

    def remove(self, attempt: WaitingAttempt) -> None:
        """Forget an attempt: its answer has begun, or it has failed."""
        if attempt in self._attempts:
            del self._attempts[attempt]
            there = self._at_worker[attempt.worker]
            del there[attempt]
            if not there:
                del self._at_worker[attempt.worker]

    def longest(self, now: float) -> list[WaitingAttempt]:
        """Return a few attempts with the longest remaining wait, without those that are next at their workers."""
        attempts = list(self._attempts)
        self._offset = (self._offset + EXAMINED) % len(attempts) if len(attempts) > EXAMINED else 0
        unstarted: dict[Worker, _Unstarted] = {}
        seconds: dict[WaitingAttempt, float] = {}
        for attempt in (attempts[self._offset :] + attempts[: self._offset])[:EXAMINED]:
            if attempt.was_asked:
                continue
            if (there := unstarted.get(attempt.worker)) is None:
                there = unstarted[attempt.worker] = self._unstarted(attempt.worker, now)
            tokens = remaining_tokens(attempt, there.known, there.longer_than(attempt.tokens), now)
            if tokens > attempt.tokens:
                seconds[attempt] = tokens / (attempt.worker.load.prefill_rate or PRIOR_RATE)
        return sorted(seconds, key=lambda attempt: -seconds[attempt])[:RANKED]

    def remaining_tokens(self, attempt: WaitingAttempt, now: float) -> float:
        """Return the tokens that the worker computes until the attempt's prompt is computed."""
        there = self._unstarted(attempt.worker, now)
        return remaining_tokens(attempt, there.known, there.longer_than(attempt.tokens), now)

    def _unstarted(self, worker: Worker, now: float) -> "_Unstarted":
        return _Unstarted(self._at_worker[worker], score_locally(worker, 1, now), now)


class _Unstarted:
    """The prompts at one worker that have not started, by length: a check computes them once for all attempts there."""

    def __init__(self, attempts: Iterable[WaitingAttempt], known: ScoredWorker, now: float) -> None:
        self.known = known
        self._lengths = sorted(attempt.tokens for attempt in attempts if tokens_until_turn(attempt, known, now) > attempt.tokens)
        self._sums = [0.0, *accumulate(self._lengths)]

    def longer_than(self, tokens: float) -> float:
        """Return the tokens of all longer prompts."""
        return self._sums[-1] - self._sums[bisect_right(self._lengths, tokens)]


def tokens_until_turn(attempt: WaitingAttempt, known: ScoredWorker, now: float) -> float:
    """Return the tokens up to the attempt's last one, if its worker serves by arrival: those ahead of it, less the progress since."""
    return max(attempt.tokens, attempt.ahead - (known.rate or PRIOR_RATE) * (now - attempt.sent_at))


def remaining_tokens(attempt: WaitingAttempt, known: ScoredWorker, longer: float, now: float) -> float:
    """Return the tokens that the worker computes until the attempt's prompt is computed.

    Workers serve short prompts first, so the backlog counts without `longer`, the tokens of longer prompts that have not started. What
    arrived later counts only as far as the backlog is shorter. So the result is too low rather than too high, and the request stays.
    """
    left = max(attempt.tokens, known.backlog + known.reserved_tokens - longer)
    return min(left, known.backlog + known.reserved_tokens, tokens_until_turn(attempt, known, now))


def find_gain(tokens: float, here: StartEstimate, others: Iterable[StartEstimate]) -> float:
    """Return the seconds that the best of the others saves beyond LEAST_RATIO; 0 or less: the request stays. `tokens`: `remaining_tokens`.

    The other's score has the price for the requests that wait there. Staying costs nothing in addition. The worker needs a step to let the
    request go.
    """
    best = min((other.score for other in others if other.fits), default=None)
    if best is None:
        return 0.0
    return tokens / here.rate + here.step + ITL_STEPS * here.step - LEAST_RATIO * (best + here.step)
