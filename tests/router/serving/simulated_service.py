"""Clients, admission and workers in simulated time: the router's own decisions, workers that prefill in order of arrival, no sockets."""

import heapq
import itertools
import random
from dataclasses import dataclass

from fairlead_router.service_classes import ServiceClass
from fairlead_router.serving.bounded_admission import BoundedAdmission, BoundedRequest, WorkerEstimate

RATE = 4000.0
"""Prompt tokens a second of each worker."""
CHAT = ServiceClass(name="chat", ttft_milliseconds=1000, ttft_milliseconds_per_thousand_tokens=500)


@dataclass
class Outcome:
    """Counts of a run. A request is good if its first token came within its bound, `seconds` after it was sent the last time."""

    offered: int = 0
    admitted: int = 0
    good: int = 0
    good_tokens: float = 0.0
    rejected: int = 0
    returned: int = 0
    """Requests that came back exactly when they were told to, with a booking."""
    returned_admitted: int = 0
    returned_good: int = 0


def run(
    load: float,
    *,
    workers: int = 1,
    seconds: float = 120.0,
    seed: int = 0,
    returns: float = 1.0,
    error: float = 0.0,
    admission: BoundedAdmission | None = None,
) -> Outcome:
    """Simulate arrivals at `load` times the capacity.

    `returns`: share of the rejected requests that come back. `error`: largest relative error of the expected prefill time.
    `admission`: None: every request is admitted.
    """
    rng, outcome, numbers = random.Random(seed), Outcome(), itertools.count()
    free_at = [0.0] * workers
    mean = 1000.0
    arrivals: list[tuple[float, int, int, float, bool]] = []
    now = 0.0
    while (now := now + rng.expovariate(load * workers * RATE / mean)) < seconds:
        number = next(numbers)
        arrivals.append((now, number, number, rng.uniform(0.2, 1.8) * mean, False))
    outcome.offered = len(arrivals)
    heapq.heapify(arrivals)
    while arrivals:
        now, _, key, tokens, has_booking = heapq.heappop(arrivals)
        if now > seconds:
            break
        outcome.returned += has_booking
        if admission is not None:
            estimates = [WorkerEstimate(max(0.0, free - now), RATE, tokens, is_idle=free <= now) for free in free_at]
            verdict = admission.decide(BoundedRequest(key, "", 0, CHAT), estimates, 0, now)
            if verdict.rejection:
                outcome.rejected += 1
                booked = admission.ledger.find(key) is not None
                if rng.random() < returns:
                    heapq.heappush(arrivals, (now + verdict.retry_after, next(numbers), key, tokens, booked))
                continue
        chosen = min(range(workers), key=free_at.__getitem__)
        first_token = max(now, free_at[chosen]) + tokens / RATE * (1 + rng.uniform(-error, error))
        free_at[chosen] = first_token
        is_good = first_token - now <= CHAT.ttft_bound(tokens)
        outcome.admitted += 1
        outcome.returned_admitted += has_booking
        if is_good and first_token <= seconds:
            outcome.good += 1
            outcome.good_tokens += tokens
            outcome.returned_good += has_booking
    return outcome
