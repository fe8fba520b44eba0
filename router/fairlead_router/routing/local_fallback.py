"""Choosing without the index: by what each worker last said of itself, and by our own requests there that have no answer yet."""

import random
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from fairlead_index.score import HOLDERS, ScoredWorker, StartEstimate, rank_candidates
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.policies import Tried, Wanted

BLOCK_TOKENS = 64
"""Of a worker that no index names: the least that a prompt is reckoned to cost it."""


HomeOf = Callable[[int], Worker | None]
"""The worker that every router would name for a block's hash; None where none may be used."""


def soonest_of(wanted: Wanted, table: WorkerTable, tried: Tried = ()) -> Worker | None:
    """As `soonest_alone`, of the workers that may be chosen; None while there is none. Costs the same in a large fleet."""
    workers = table.soonest(HOLDERS, tried, wanted.model)  # and up to as many homes
    may = table.may(tried, wanted.model)
    return soonest_alone(wanted, workers, lambda place: table.home(place, may)) if workers else None


def soonest_alone(wanted: Wanted, workers: Sequence[Worker], home_of: HomeOf, now: float | None = None) -> Worker:
    """The worker whose expected wait is shortest, less what the prompt's beginning would save where it is at home.

    Each depth that is a power of two has a home: the worker that its block names. So a conversation stays until it is twice as long, and a
    beginning that all prompts share draws them together by no more than it is worth.
    """
    starts = {worker.address: _start(worker, wanted.prompt_tokens, now) for worker in workers}
    best = min(workers, key=lambda worker: (starts[worker.address], random.random()))
    soonest, blocks = starts[best.address], len(wanted.hashes)
    for level in range(blocks.bit_length()):
        depth = 1 << level
        home = home_of(wanted.hashes[depth - 1])
        if home is None:
            break
        full, seconds = starts.get(home.address) or _start(home, wanted.prompt_tokens, now)
        start = (full, seconds - wanted.prompt_tokens * depth / (blocks * home.rate))
        if start < soonest:
            best, soonest = home, start
    return best


def soonest_start(wanted: Wanted, workers: Iterable[Worker]) -> StartEstimate:
    """When the best of them (there is one) would give the first token, with none of the prompt in its cache: by the index's own score."""
    return rank_candidates([scored_alone(worker, BLOCK_TOKENS) for worker in workers], b"", wanted.prompt_tokens, bytes(8), 1)[0]


def _start(worker: Worker, prompt_tokens: int, now: float | None) -> tuple[bool, float]:
    """Whether it has no room for the prompt, and seconds until it would begin it."""
    known = scored_alone(worker, 1, now)
    full = bool(known.pages_total) and known.pages_free * known.page_size < prompt_tokens
    return full, (known.backlog + known.reserved_tokens) / worker.rate + known.step


def scored_alone(worker: Worker, block_tokens: int, now: float | None = None) -> ScoredWorker:
    """What is waiting there is what it said, less what it has done since, or what we know to have sent it: whichever is more."""
    load = worker.load
    backlog = max(0.0, load.backlog_tokens - load.prefill_rate * ((monotonic() if now is None else now) - worker.load_at))
    return ScoredWorker(
        address=worker.address,
        block_tokens=block_tokens,
        reserved_tokens=max(0.0, worker.pending_tokens - backlog),
        backlog=backlog,
        rate=load.prefill_rate,
        step=load.step_seconds,
        pages_free=load.pages_free,
        pages_total=load.pages_total,
        page_size=load.page_size,
    )
