"""Withdrawal: a request that still waits at its worker moves to another one that would answer it earlier.

The score places a request by what is known when it arrives. Later a worker slows down, another becomes idle or joins. Here the router
compares again for requests whose answer has not begun, a few at a time (`waiting_attempts.py`).
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from time import monotonic

from prometheus_client import Counter

from fairlead_index.score import StartEstimate
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.ranking import Ranking
from fairlead_router.serving.waiting_attempts import CHECK_SECONDS, WaitingAttempt, WaitingAttempts, find_gain
from fairlead_router.supervision import supervise
from fairlead_router.wire.upstream import UpstreamError

CALL_SECONDS = 1.0
"""Limit of the call to the worker, and of the wait for its effect."""

Rank = Callable[[RoutingRequest], Awaitable[Ranking]]


class Withdrawals:
    """The attempts without an answer, and the task that withdraws some of them, one at a time.

    Each withdrawal waits for its effect, so the next comparison sees the request at its new worker.
    """

    def __init__(self, table: WorkerTable, rank: Rank | None, failures: Counter) -> None:
        """`rank`: compares workers; None with a policy without a score, and nothing is withdrawn. `failures`: counter, by task."""
        self._table, self._rank, self._failures = table, rank, failures
        self._waiting = WaitingAttempts()
        self._asked: tuple[WaitingAttempt, asyncio.Event] | None = None
        """The attempt that is being withdrawn, and the end of its wait."""
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
        return self._waiting.add(request, worker, tokens, monotonic(), os.urandom(16).hex())

    def end(self, attempt: WaitingAttempt) -> None:
        """Forget an attempt: its answer has begun, or it has failed."""
        self._waiting.remove(attempt)
        if self._asked is not None and self._asked[0] is attempt:
            self._asked[1].set()

    async def _run(self, rank: Rank) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if (attempt := await self._find(rank)) is not None:
                await self._withdraw(attempt)

    async def _find(self, rank: Rank) -> WaitingAttempt | None:
        """Return the attempt that gains most from another worker; None if none does."""
        best, most = None, 0.0
        for attempt in self._waiting.longest(monotonic()):
            ranking = await rank(attempt.request)
            if attempt not in self._waiting:
                continue
            starts = {start.address: start for start in ranking.starts}
            here = starts.pop(attempt.worker.address, None)
            if here is None:
                continue
            tokens = self._waiting.remaining_tokens(attempt, monotonic())
            gain = find_gain(tokens, here, (start for start in starts.values() if self._may_move(attempt, start)))
            if gain > most:
                best, most = attempt, gain
        return best if best is not None and best in self._waiting else None  # it may have ended while the next one was ranked

    def _may_move(self, attempt: WaitingAttempt, start: StartEstimate) -> bool:
        """Return whether the worker is on the same side of a canary's split."""
        worker = self._table.get(start.address)
        return worker is not None and worker.usable and worker.canary == attempt.worker.canary

    async def _withdraw(self, attempt: WaitingAttempt) -> None:
        """Ask the worker to let the request go. Its own answer says whether it did; a failed call changes nothing."""
        attempt.was_asked, ended = True, asyncio.Event()
        self._asked = attempt, ended
        try:
            head, _ = await attempt.worker.admin.fetch(f"/internal/withdraw/{attempt.name}", CALL_SECONDS, method="POST")
            if head.status == 202:
                async with asyncio.timeout(CALL_SECONDS):
                    await ended.wait()
        except (UpstreamError, TimeoutError):
            pass
        finally:
            self._asked = None
