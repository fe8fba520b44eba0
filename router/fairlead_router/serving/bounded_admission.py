"""Admission of requests whose class bounds the time to first token (TTFT) or the inter-token latency (ITL). Pure: no clock.

A request is admitted if some worker can serve it within its class's bounds, and no others go before it (`CachedFirst`). Else it is
rejected, with the time at which it can be admitted.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from fairlead_router.service_classes import ServiceClass
from fairlead_router.serving.cached_first import CachedFirst
from fairlead_router.serving.promise_ledger import Demand, PromiseLedger

PLANNED_SHARE = 0.9
"""Share of a bound that plans use. The rest is for errors of the estimate: else half of the requests at the edge would be late."""
RETURN_SHARE = 0.95
"""Share of its bound that a request may use when it returns as promised."""
ITL_RETRY_SECONDS = 1
"""`Retry-After` while every worker's steps are too long: workers report them once a second."""


@dataclass(frozen=True, slots=True)
class WorkerEstimate:
    """What a worker can do for one request.

    `wait`: seconds until it could begin a prompt. `rate`: prompt tokens a second, 0: not measured. `uncached`: prompt tokens to compute.
    """

    wait: float
    rate: float
    uncached: float
    step_seconds: float = 0.0
    is_idle: bool = False
    """It has no request at all."""


@dataclass(frozen=True, slots=True)
class BoundedRequest:
    """A request of a class with a bound. `elapsed`: seconds since its arrival. `key`: the same when the client sends it again.

    `prompt_tokens`: all of its prompt. `cached`: those of them that the worker with the most caches.
    """

    key: Hashable
    tenant: str
    priority: int
    service_class: ServiceClass
    elapsed: float = 0.0
    prompt_tokens: int = 0
    cached: int = 0

    @property
    def uncached(self) -> int:
        return max(1, self.prompt_tokens - self.cached)

    def slack(self, worker: WorkerEstimate, share: float = 1.0) -> float:
        """Return the longest wait at the worker with which it meets `share` of its bound, seconds; negative: even an idle one is late.

        The wait alone must be within the bound of an empty prompt. Otherwise the queue becomes as long as the longest prompts allow, and
        only those are admitted (`fairlead simulate`, conversation trace at twice the capacity: a third of the goodput).
        """
        bound, shortest = self.service_class.ttft_bound(worker.uncached), self.service_class.ttft_bound(0)
        return min(share * shortest, share * bound - worker.uncached / worker.rate) - self.elapsed

    def margin(self, worker: WorkerEstimate) -> float:
        """Return by how many seconds it meets its bound at the worker."""
        return self.slack(worker) - worker.wait

    def is_too_long(self, worker: WorkerEstimate) -> bool:
        """Return whether even an idle worker like this one would be late, had the request arrived now."""
        return self.elapsed + self.slack(worker) < 0

    def is_within_itl(self, worker: WorkerEstimate) -> bool:
        return worker.step_seconds <= self.service_class.itl_bound

    def can_start(self, worker: WorkerEstimate, ahead: float = 0.0, share: float = 1.0) -> bool:
        """Return whether the worker meets the bounds. `ahead`: seconds of work that the worker's wait does not include."""
        if not self.is_within_itl(worker):
            return False
        return not self.service_class.bounds_ttft or not worker.rate or worker.wait + ahead <= self.slack(worker, share)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rejection`: empty if the request is admitted; `itl`, `late`: later it can be; `too_long`: not even an idle worker is fast enough.

    `outbid`: prompts of which more is cached leave no capacity for it within its bound.

    `expected` and `bound`: the TTFT in seconds.
    """

    rejection: Literal["", "itl", "late", "too_long", "outbid"] = ""
    retry_after: int = 0
    expected: float = 0.0
    bound: float = 0.0


ADMITTED = Verdict()


class BoundedAdmission:
    """Decides about bounded requests. `ledger` holds the promises to rejected ones."""

    def __init__(self) -> None:
        self.ledger = PromiseLedger()
        self._cached_first = CachedFirst()

    def decide(
        self,
        request: BoundedRequest,
        workers: Sequence[WorkerEstimate],
        ahead_tokens: float,
        now: float,
        fleet: int = 0,
        share: float = 1.0,
    ) -> Verdict:
        """Return the verdict. `workers`: at least one; `fleet`: number of all, if these are only the soonest.

        `ahead_tokens`: prompt tokens that go before it and are at no worker yet. `share`: of the capacity, that this router uses.
        A worker without a measured rate may be fast enough, so the request goes there.
        """
        self.ledger.expire(now)
        booking = self.ledger.find(request.key)
        usable = [worker for worker in workers if request.is_within_itl(worker)]
        if not usable:
            if booking is None:
                self._cached_first.record(request.priority, request.uncached, request.prompt_tokens, now)
            self._cached_first.record_refusal(now)
            return Verdict("itl", ITL_RETRY_SECONDS)
        if not request.service_class.bounds_ttft or not all(worker.rate for worker in usable):
            return ADMITTED
        total_rate = sum(worker.rate for worker in usable) * max(1.0, fleet / len(workers))
        ahead = ahead_tokens / total_rate
        able = [worker for worker in usable if request.can_start(worker, ahead, PLANNED_SHARE)]
        # Its cost where it would run: a cached prompt whose workers are all late is computed again elsewhere.
        cost = min((worker.uncached for worker in able), default=request.uncached)
        if booking is None:
            self._cached_first.record(request.priority, cost, request.prompt_tokens, now)
        cheapest = [worker for worker in able if worker.uncached == cost]
        best = max(cheapest or usable, key=request.margin)
        if request.is_too_long(best):
            if any(worker.is_idle for worker in usable) and not ahead:
                return ADMITTED  # it delays no request there, and updates the measured rate
            # A worker that caches the prompt may be fast enough, but have the longer queue.
            best = max((worker for worker in usable if not request.is_too_long(worker)), key=request.margin, default=best)
        wait, bound = best.wait + ahead, request.service_class.ttft_bound(best.uncached)
        expected = request.elapsed + wait + best.uncached / best.rate
        if request.is_too_long(best):
            return Verdict("too_long", 0, expected, bound)
        planned = max(0.0, request.slack(best, PLANNED_SHARE))
        demand = Demand(request.key, request.tenant, request.priority, best.uncached, planned)
        # The least wait is one worker's, and bookings share all: theirs is the median, which a few stuck workers do not move.
        shared = max(wait, ahead + median_low(worker.wait for worker in usable))
        own_rate = share * total_rate
        turn = self._cached_first.next_turn(request.priority, cost, request.prompt_tokens, own_rate, now)
        is_outbid = turn > planned  # it may wait for so long anyway
        if booking is not None and booking.at <= now:
            is_kept = wait <= request.slack(best, RETURN_SHARE)
            self.ledger.close(booking, is_kept)
            if is_kept:
                return ADMITTED
            turn, is_outbid = 0.0, False  # it had its turn
        elif not is_outbid and self.ledger.fits(demand, shared, total_rate, now, wait):
            if booking is not None:
                self.ledger.close(booking, kept=True)
            else:
                self._cached_first.take_turn(request.priority, cost, request.prompt_tokens, own_rate, now)
            return ADMITTED
        elif booking is not None:
            return Verdict("outbid" if is_outbid else "late", max(1, math.ceil(booking.at - now)), expected, bound)
        if not is_outbid:
            self._cached_first.record_refusal(now)
        seconds = self.ledger.promise(demand, shared, total_rate, now, turn)
        if is_outbid and self.ledger.find(request.key) is not None:
            returning = self.ledger.return_share(request.tenant)
            self._cached_first.take_turn(request.priority, cost, request.prompt_tokens, own_rate, now, returning)
        return Verdict("outbid" if is_outbid else "late", seconds, expected, bound)
