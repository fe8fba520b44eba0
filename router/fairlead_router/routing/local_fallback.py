"""Routing without the index: by each worker's last reported load and this router's own requests without an answer."""

import random
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from fairlead_index.score import HOLDERS, ScoredWorker, StartEstimate, congestion, delayed_arrivals, rank_candidates
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.policies import RoutingRequest, Tried

BLOCK_TOKENS = 64
"""Block size assumed for a worker that is not in the index: the least cost of a prompt, tokens."""


HomeOf = Callable[[int], Worker | None]
"""Return the worker that every router would choose for a block's hash; None if no eligible worker exists."""


def choose_from_table(request: RoutingRequest, table: WorkerTable, tried: Tried = ()) -> Worker | None:
    """Return `choose_soonest` of the table's eligible workers; None while there is none. The cost does not grow with a large fleet."""
    workers = table.soonest(HOLDERS, tried, request.model)  # and up to as many homes
    allowed = table.eligible_addresses(tried, request.model)
    return choose_soonest(request, workers, lambda place: table.home(place, allowed)) if workers else None


def choose_soonest(request: RoutingRequest, workers: Sequence[Worker], home_of: HomeOf, now: float | None = None) -> Worker:
    """Return the worker with the shortest expected wait plus prefill, less what the prompt's prefix would save at its home worker.

    A second of prefill counts once for this request, and once for each request that waits (`congestion`) or will (`delayed_arrivals`).

    Each power-of-two depth has a home: the worker that its block hashes to. A conversation thus stays at its home until it is twice as
    long, and a prefix that all prompts share attracts them by no more than the prefill it saves.
    """
    price = congestion([score_locally(worker, 1, now) for worker in workers])

    def score(worker: Worker, cached: float) -> tuple[bool, float]:
        """`cached`: share of the prompt."""
        full, seconds = _expected_start(worker, request.prompt_tokens, now)
        work = (1 - cached) * request.prompt_tokens / worker.rate
        return full, seconds + work * (1 + price + delayed_arrivals(score_locally(worker, 1, now), work))

    scores = {worker.address: score(worker, 0.0) for worker in workers}
    best = min(workers, key=lambda worker: (scores[worker.address], random.random()))
    lowest, blocks = scores[best.address], len(request.hashes)
    for level in range(blocks.bit_length()):
        depth = 1 << level
        home = home_of(request.hashes[depth - 1])
        if home is None:
            break
        if (found := score(home, depth / blocks)) < lowest:
            best, lowest = home, found
    return best


def earliest_start(request: RoutingRequest, workers: Iterable[Worker]) -> StartEstimate:
    """Return the earliest start among the workers (at least one), with no cached tokens, by the index's own score."""
    return rank_candidates([score_locally(worker, BLOCK_TOKENS) for worker in workers], b"", request.prompt_tokens, bytes(8), 1)[0]


def _expected_start(worker: Worker, prompt_tokens: int, now: float | None) -> tuple[bool, float]:
    """Return whether the worker's KV cache is full for the prompt, and the seconds until it would begin the prompt."""
    known = score_locally(worker, 1, now)
    full = bool(known.pages_total) and known.pages_free * known.page_size < prompt_tokens
    return full, (known.backlog + known.reserved_tokens) / worker.rate + known.step


def score_locally(worker: Worker, block_tokens: int, now: float | None = None) -> ScoredWorker:
    """Return the worker's score input. Its backlog is the larger of the reported one less progress, and pending tokens."""
    load = worker.load
    backlog = max(0.0, load.backlog_tokens - load.prefill_rate * ((monotonic() if now is None else now) - worker.load_at))
    return ScoredWorker(
        address=worker.address,
        block_tokens=block_tokens,
        reserved_tokens=max(0.0, worker.pending_tokens - backlog),
        waiting=load.waiting,
        backlog=backlog,
        rate=load.prefill_rate,
        step=load.step_seconds,
        pages_free=load.pages_free,
        pages_total=load.pages_total,
        page_size=load.page_size,
        arrivals=load.arrival_rate,
    )
