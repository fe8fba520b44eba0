"""Computes how many workers the demand needs, from arriving and waiting tokens and from measured rates. Pure.

More workers are needed when the expected wait before prefill, now or when another worker could be ready, leaves less of the TTFT target
than the prompt's own prefill takes. Then enough are recommended to prefill the arriving prompts at a load that keeps the queue as short as
the target requires (the mean wait of an M/D/1 queue, Pollaczek and Khinchine), and to work off the backlog. Below the target no worker is
added, however busy they are. Workers that recent bursts needed stay.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from fairlead_operator.observed import Recommendation
from fairlead_operator.scaling.demand import Demand

WINDOW = 15.0  # seconds over which routers average arrivals, so that a step of load is complete after that time
MAX_LOAD, MIN_LOAD = 0.8, 0.3  # of a worker's measured rate: noise always has this headroom, and no target requires more
FULL_SHARE = 0.9  # of the requests that a worker can run
SCALE_DOWN_SHARE = 0.8  # a smaller pool must do with this share of its capacity: hysteresis between two sizes
MIN_WAIT_SHARE = 0.25  # of the target stays for waiting, where the prefill alone takes longer
CATCH_UP_FACTOR = 5.0  # times the seconds until more workers serve: the backlog is gone by then, and causes no second scale-up


@dataclass(frozen=True)
class WorkerPool:
    """The workers. `start_seconds`: from a pod's creation to its readiness, as measured on pods."""

    desired: int
    ready: int
    start_seconds: float
    serving_since: float = 0.0  # seconds since the epoch when the longest-ready worker became ready; infinity: none is ready

    def idle(self, seconds: float, at: float) -> float:
        """Return the part of `seconds` without a request in which a worker was ready.

        Otherwise a worker that loads for longer than the idle time would be removed before it ever served.
        """
        return max(0.0, min(seconds, at - self.serving_since))


class Arrivals:
    """Prompt tokens to compute that arrived in the windows that end now. The routers' rate is the mean of WINDOW."""

    def __init__(self, at: float, now: float, recent: Sequence[Recommendation]) -> None:
        self.now = now
        self._at, self._recent = at, recent

    def windows(self, longest: float) -> Iterator[tuple[float, float]]:
        """Yield seconds and tokens of each window, the shortest first, up to about `longest` seconds."""
        tokens, begin = self.now * WINDOW, self._at - WINDOW
        yield WINDOW, tokens
        for one in reversed(self._recent):
            if self._at - begin >= longest:
                return
            # A sample covers the WINDOW before it, without the part that a newer one covers. Gaps occur only while nothing arrives.
            if one.at - WINDOW < begin:
                tokens += one.tokens_per_second * (min(begin, one.at) - (one.at - WINDOW))
                begin = one.at - WINDOW
                yield self._at - begin, tokens

    def mean(self, longest: float) -> float:
        """Return the tokens per second of the longest such window."""
        *_, (seconds, tokens) = self.windows(longest)
        return tokens / seconds


def recommend(demand: Demand, pool: WorkerPool, target: float, at: float, recent: Sequence[Recommendation] = ()) -> Recommendation:
    """Return the sizes for `target`, the seconds to the first token. Without some router's report `demand` is a lower bound.

    `recent`: earlier recommendations, oldest first. They say what arrived before the routers' window.
    """
    rates = Arrivals(at, demand.tokens_per_second, recent)
    has_requests, had_requests = demand.active > 0 or demand.queued > 0, demand.requests_per_second > 0
    if pool.desired == 0:
        waking = max(1, math.ceil(_steady_workers(demand, target, demand.tokens_per_second))) if has_requests or had_requests else 0
        waiting = max(1, demand.active)
        why = f"{waiting} requests wait for a worker" if waiting > 1 else "a request waits for a worker"
        return Recommendation(at, waking, waking, 0.0 if has_requests else demand.idle_seconds, has_requests, had_requests, why, rates.now)
    scale_up_to, why = _scale_up_target(demand, pool, target, rates)
    steady = max(_steady_workers(demand, target, rates.mean(math.inf)), _decode_workers(demand)) / SCALE_DOWN_SHARE
    scale_down_to = max(1, math.ceil(steady), math.ceil(_burst_workers(demand, pool, target, rates)))
    if not demand.complete:
        scale_down_to = max(scale_down_to, pool.desired)
    idle = pool.idle(demand.idle_seconds, at) if demand.complete else 0.0
    return Recommendation(at, scale_up_to, max(scale_down_to, scale_up_to), idle, has_requests, had_requests, why, rates.now)


def _scale_up_target(demand: Demand, pool: WorkerPool, target: float, rates: Arrivals) -> tuple[int, str]:
    """Return the size and the reason; 0 where no more workers are needed."""
    starting = pool.ready < pool.desired  # the backlog is for the starting workers: counting it again would add workers without end
    workers, rate = len(demand.workers), demand.prefill_rate
    if workers and rate:
        own = _prefill_seconds(demand) + fmean(one.step_seconds for one in demand.workers)
        # What arrived in as long as a start takes is expected to arrive again until workers that are added now can serve.
        ahead = (rates.mean(WINDOW + pool.start_seconds) - pool.desired * rate) * pool.start_seconds
        wait, later = demand.backlog_tokens / (workers * rate), (demand.backlog_tokens + ahead) / (pool.desired * rate)
        longest = max(target - own, MIN_WAIT_SHARE * target)
        if max(wait, later) > longest:
            catch_up = CATCH_UP_FACTOR * (WINDOW + pool.start_seconds)
            expected = rates.mean(_steady_seconds(pool, target))
            piled = 0.0 if starting else (expected + demand.backlog_tokens / catch_up) / rate
            sized = math.ceil(max(_steady_workers(demand, target, expected), piled, _burst_workers(demand, pool, target, rates)))
            if sized > pool.desired:
                when = f"{wait + own:.1f}s" if wait > longest else f"{later + own:.1f}s in {pool.start_seconds:.0f}s"
                return sized, f"expected TTFT {when} over target {target:g}s"
    waiting = demand.queued + sum(one.waiting for one in demand.workers)
    room = _capacity(demand)
    if waiting and room and not starting and sum(one.running for one in demand.workers) >= FULL_SHARE * room * workers:
        sized = math.ceil(_decode_workers(demand))
        if sized > pool.desired:
            return sized, f"{waiting} requests wait, and all workers run as many as they can"
    return 0, ""


def _prefill_seconds(demand: Demand) -> float:
    """Return the seconds in which a worker prefills a prompt of mean length."""
    if not demand.requests_per_second or not demand.prefill_rate:
        return 0.0
    return demand.tokens_per_second / demand.requests_per_second / demand.prefill_rate


def _steady_seconds(pool: WorkerPool, target: float) -> float:
    """Return for how long a rate must last to need workers of its own, rather than to wait.

    For windows of four targets, `_burst_workers` and `_steady_workers` at MAX_LOAD ask for as many. After a start and the target, workers
    that the burst called for serve already.
    """
    return max(WINDOW, min(target / (1 / MAX_LOAD - 1), WINDOW + pool.start_seconds + target))


def _burst_workers(demand: Demand, pool: WorkerPool, target: float, rates: Arrivals) -> float:
    """Return the workers that serve all that arrived lately within the target, without help: no window brought more than they compute in
    its time and the target.

    Longer windows than a start do not count: workers that are added when they begin serve their end. This is the arrival curve of network
    calculus (Le Boudec and Thiran, 2001), measured.
    """
    if not demand.prefill_rate:
        return 0.0
    wait = max(target - _prefill_seconds(demand), MIN_WAIT_SHARE * target)
    return max(tokens / (demand.prefill_rate * (seconds + wait)) for seconds, tokens in rates.windows(WINDOW + pool.start_seconds))


def _steady_workers(demand: Demand, target: float, tokens_per_second: float) -> float:
    """Return the workers that prompts need which arrive at this rate."""
    if not demand.prefill_rate:
        return 0.0
    own = _prefill_seconds(demand)
    wait = max(target - own, MIN_WAIT_SHARE * target) / 2  # the mean: some requests wait longer
    load = max(MIN_LOAD, min(MAX_LOAD, 2 * wait / (2 * wait + own)))
    return tokens_per_second / (demand.prefill_rate * load)


def _decode_workers(demand: Demand) -> float:
    """Return the workers that concurrent answers need: the present ones, or the expected ones (Little's law)."""
    room = _capacity(demand)
    if not room:
        return 0.0
    running = sum(one.running for one in demand.workers)
    return max(running, demand.requests_per_second * demand.answer_seconds) / (FULL_SHARE * room)


def _capacity(demand: Demand) -> float:
    """Return how many requests one worker can run concurrently, by its own limit and by the pages that they need; 0: unknown."""
    limits = [float(one.max_running) for one in demand.workers if one.max_running]
    running, used = sum(one.running for one in demand.workers), sum(one.pages_total - one.pages_free for one in demand.workers)
    if running and used:
        limits.append(fmean(one.pages_total for one in demand.workers) * running / used)
    return min(limits, default=0.0)
