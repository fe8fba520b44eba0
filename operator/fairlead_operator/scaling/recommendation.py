"""How many workers the present demand needs: from tokens that come and wait, and from what a worker was measured to do. Pure.

More are needed when the expected wait for a worker's start on a prompt leaves less of the target than the prompt's own computation takes:
then as many as can compute what comes, at a load at which a queue stays as short as the target asks (the mean wait of an M/D/1 queue,
Pollaczek and Khinchine), and work off what has piled up. Below the target nothing is ever added, however busy the workers are.
"""

import math
from dataclasses import dataclass
from statistics import fmean

from fairlead_operator.observed import Recommendation
from fairlead_operator.scaling.demand import Demand

WINDOW = 15.0  # seconds: routers average what comes over as many, so a step of load is whole after that time
MAX_LOAD, MIN_LOAD = 0.8, 0.3  # of a worker's measured rate: noise is never given less room, and no target asks for more
FULL_SHARE = 0.9  # of the requests that a worker can run
SCALE_DOWN_SHARE = 0.8  # a smaller fleet must do with this part of what it could: between the two sizes nothing is changed
MIN_WAIT_SHARE = 0.25  # of the target is left for waiting, where the prompts alone take longer than it
CATCH_UP_FACTOR = 5.0  # times the seconds until more workers serve: what has piled up by then is gone, and causes no second raise


@dataclass(frozen=True)
class WorkerPool:
    """The workers. `start_seconds`: from a pod's creation to its readiness, as pods have shown it."""

    wanted: int
    ready: int
    start_seconds: float
    serving_since: float = 0.0  # seconds since the epoch, of the worker that is ready for longest; infinity: none is

    def idle(self, seconds: float, at: float) -> float:
        """Of `seconds` without a request, those in which a worker could have served one: one that loads for longer than an idle service
        is kept would otherwise be taken away before it ever did."""
        return max(0.0, min(seconds, at - self.serving_since))


def recommend(demand: Demand, pool: WorkerPool, target: float, at: float) -> Recommendation:
    """`target`: seconds to the first token. A silent router's part is missing in `demand`: what is needed is then at least this much."""
    has_requests, had_requests = demand.active > 0 or demand.queued > 0, demand.requests_per_second > 0
    if pool.wanted == 0:
        waking = max(1, math.ceil(_steady_workers(demand, target))) if has_requests or had_requests else 0
        waiting = max(1, demand.active)
        why = f"{waiting} requests wait for a worker" if waiting > 1 else "a request waits for a worker"
        return Recommendation(at, waking, waking, 0.0 if has_requests else demand.idle_seconds, has_requests, had_requests, why)
    scale_up_to, why = _scale_up_target(demand, pool, target)
    scale_down_to = max(
        1, math.ceil(_steady_workers(demand, target) / SCALE_DOWN_SHARE), math.ceil(_decode_workers(demand) / SCALE_DOWN_SHARE)
    )
    if not demand.complete:
        scale_down_to = max(scale_down_to, pool.wanted)
    idle = pool.idle(demand.idle_seconds, at) if demand.complete else 0.0
    return Recommendation(at, scale_up_to, max(scale_down_to, scale_up_to), idle, has_requests, had_requests, why)


def _scale_up_target(demand: Demand, pool: WorkerPool, target: float) -> tuple[int, str]:
    """0 where nothing more is needed, and why otherwise."""
    starting = pool.ready < pool.wanted  # what piles up meanwhile is for those that come: counted again it would call for ever more
    workers, rate = len(demand.workers), demand.prefill_rate
    if workers and rate:
        own = _prefill_seconds(demand) + fmean(one.step_seconds for one in demand.workers)
        wait = demand.backlog_tokens / (workers * rate)
        if wait > max(target - own, MIN_WAIT_SHARE * target):
            catch_up = CATCH_UP_FACTOR * (WINDOW + pool.start_seconds)
            piled = 0.0 if starting else (demand.tokens_per_second + demand.backlog_tokens / catch_up) / rate
            sized = math.ceil(max(_steady_workers(demand, target), piled))
            if sized > pool.wanted:
                return sized, f"expected TTFT {wait + own:.1f}s over target {target:g}s"
    waiting = demand.queued + sum(one.waiting for one in demand.workers)
    room = _capacity(demand)
    if waiting and room and not starting and sum(one.running for one in demand.workers) >= FULL_SHARE * room * workers:
        sized = math.ceil(_decode_workers(demand))
        if sized > pool.wanted:
            return sized, f"{waiting} requests wait, and all workers run as many as they can"
    return 0, ""


def _prefill_seconds(demand: Demand) -> float:
    """Seconds in which a worker computes a prompt of mean length."""
    if not demand.requests_per_second or not demand.prefill_rate:
        return 0.0
    return demand.tokens_per_second / demand.requests_per_second / demand.prefill_rate


def _steady_workers(demand: Demand, target: float) -> float:
    """Workers for the prompts that come."""
    if not demand.prefill_rate:
        return 0.0
    own = _prefill_seconds(demand)
    wait = max(target - own, MIN_WAIT_SHARE * target) / 2  # the mean: some wait longer
    load = max(MIN_LOAD, min(MAX_LOAD, 2 * wait / (2 * wait + own)))
    return demand.tokens_per_second / (demand.prefill_rate * load)


def _decode_workers(demand: Demand) -> float:
    """Workers for the answers that run at once: those that do, or that will (Little's law)."""
    room = _capacity(demand)
    if not room:
        return 0.0
    running = sum(one.running for one in demand.workers)
    return max(running, demand.requests_per_second * demand.answer_seconds) / (FULL_SHARE * room)


def _capacity(demand: Demand) -> float:
    """Answers that one worker can run at once: by its own limit, and by the pages that answers take; 0: unknown."""
    limits = [float(one.max_running) for one in demand.workers if one.max_running]
    running, used = sum(one.running for one in demand.workers), sum(one.pages_used for one in demand.workers)
    if running and used:
        limits.append(fmean(one.pages_total for one in demand.workers) * running / used)
    return min(limits, default=0.0)
