"""Withdrawal: a request that still waits at its worker moves to another one that would answer it earlier.

The score places a request by what is known when it arrives. Later a worker slows down, another becomes idle or joins. Here the router
compares again for requests whose answer has not begun, a few at a time.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic

from prometheus_client import Counter

from fairlead_index.score import ITL_STEPS, PRIOR_RATE, ScoredWorker, StartEstimate
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.local_fallback import score_locally
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.ranking import Ranking
from fairlead_router.supervision import supervise
from fairlead_router.wire.upstream import UpstreamError

CHECK_SECONDS = 0.1
EXAMINED = 64
"""Attempts whose remaining wait a check computes. With more of them, the next check continues."""
RANKED = 2
"""Attempts of a check, those with the longest remaining wait, for which other workers are scored."""
CALL_SECONDS = 1.0
"""Limit of the call to the worker, and of the wait for its effect."""

Rank = Callable[[RoutingRequest], Awaitable[Ranking]]


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
    name: str = field(default_factory=lambda: os.urandom(16).hex())
    """`X-Fairlead-Attempt`."""
    was_asked: bool = False
    """The worker was asked to let it go. It is not asked again."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def remaining_tokens(attempt: WaitingAttempt, known: ScoredWorker, now: float) -> float:
    """Return the tokens that the worker computes until the attempt's prompt is computed: those ahead of it, less the progress since.

    What arrived later counts only as far as the worker's whole backlog is shorter. So a worker that serves later requests first is
    underestimated, and the request stays.
    """
    rate = known.rate or PRIOR_RATE
    return min(known.backlog + known.reserved_tokens, max(attempt.tokens, attempt.ahead - rate * (now - attempt.sent_at)))


def find_gain(tokens: float, here: StartEstimate, others: Iterable[StartEstimate]) -> float:
    """Return the seconds that the best of the others saves; 0 or less: the request stays. `tokens`: `remaining_tokens`.

    The other's score has the price for the requests that wait there. Staying costs nothing in addition. The worker needs a step to let the
    request go.
    """
    best = min((other.score for other in others if other.fits), default=None)
    if best is None:
        return 0.0
    return tokens / here.rate + here.step + ITL_STEPS * here.step - (best + here.step)


class Withdrawals:
    """The attempts without an answer, and the task that withdraws some of them, one at a time.

    Each withdrawal waits for its effect, so the next comparison sees the request at its new worker.
    """

    def __init__(self, table: WorkerTable, rank: Rank | None, failures: Counter) -> None:
        """`rank`: compares workers; None with a policy without a score, and nothing is withdrawn. `failures`: counter, by task."""
        self._table, self._rank, self._failures = table, rank, failures
        self._waiting: dict[WaitingAttempt, None] = {}
        self._offset = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if (rank := self._rank) is not None:
            self._task = supervise("withdrawals", lambda: self._run(rank), self._failures)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def begin(self, request: RoutingRequest, worker: Worker, tokens: float) -> WaitingAttempt | None:
        """Record an attempt; None if nothing is withdrawn. `tokens`: already counted as pending at the worker."""
        if self._rank is None:
            return None
        now = monotonic()
        known = score_locally(worker, 1, now)
        attempt = WaitingAttempt(request, worker, tokens, known.backlog + known.reserved_tokens, now)
        self._waiting[attempt] = None
        return attempt

    def end(self, attempt: WaitingAttempt) -> None:
        """Forget an attempt: its answer has begun, or it has failed."""
        self._waiting.pop(attempt, None)
        attempt.ended.set()

    async def _run(self, rank: Rank) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if (attempt := await self._find(rank)) is not None:
                await self._withdraw(attempt)

    async def _find(self, rank: Rank) -> WaitingAttempt | None:
        """Return the attempt that gains most from another worker; None if none does."""
        best, most = None, 0.0
        for attempt in self._longest():
            ranking = await rank(attempt.request)
            if attempt not in self._waiting:
                continue
            starts = {start.address: start for start in ranking.starts}
            here = starts.pop(attempt.worker.address, None)
            if here is None:
                continue
            now = monotonic()
            tokens = remaining_tokens(attempt, score_locally(attempt.worker, 1, now), now)
            gain = find_gain(tokens, here, (start for start in starts.values() if self._may_move(attempt, start)))
            if gain > most:
                best, most = attempt, gain
        return best

    def _longest(self) -> list[WaitingAttempt]:
        """Return a few attempts with the longest remaining wait, without those that are next at their workers."""
        attempts, now = list(self._waiting), monotonic()
        self._offset = (self._offset + EXAMINED) % len(attempts) if len(attempts) > EXAMINED else 0
        seconds: dict[WaitingAttempt, float] = {}
        for attempt in (attempts[self._offset :] + attempts[: self._offset])[:EXAMINED]:
            known = score_locally(attempt.worker, 1, now)
            tokens = remaining_tokens(attempt, known, now)
            if tokens > attempt.tokens and not attempt.was_asked:
                seconds[attempt] = tokens / (known.rate or PRIOR_RATE)
        return sorted(seconds, key=lambda attempt: -seconds[attempt])[:RANKED]

    def _may_move(self, attempt: WaitingAttempt, start: StartEstimate) -> bool:
        """Return whether the worker is on the same side of a canary's split."""
        worker = self._table.get(start.address)
        return worker is not None and worker.usable and worker.canary == attempt.worker.canary

    async def _withdraw(self, attempt: WaitingAttempt) -> None:
        """Ask the worker to let the request go. Its own answer says whether it did; a failed call changes nothing."""
        attempt.was_asked = True
        try:
            head, _ = await attempt.worker.admin.fetch(f"/internal/withdraw/{attempt.name}", CALL_SECONDS, method="POST")
            if head.status == 202:
                async with asyncio.timeout(CALL_SECONDS):
                    await attempt.ended.wait()
        except (UpstreamError, TimeoutError):
            pass
