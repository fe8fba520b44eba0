"""The score: which worker should start a prompt. Pure. docs/design/prefix-index/score.md explains it.

Routers run it with and without Redis, and `fairlead simulate` too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha1
from typing import Final

from fairlead_index.expected_wait import expected_ttft, ready_key, tokens_ahead
from fairlead_index.worker_load import WorkerLoad

CIRCLE: Final = 67108859
SMALL_FLEET: Final = 16
"""Largest fleet of which all workers are scored for a prompt."""
CONSIDERED: Final = 12
"""Workers scored in a larger fleet: the HOLDERS deepest holders of the prompt, then the soonest. So the cost of a choice does not grow with
the fleet (power of d choices: Mitzenmacher 2001)."""
HOLDERS: Final = 6
MAX_WAITING: Final = 10_000.0
"""Waiting requests of one worker that count, and requests per second, so that a forged report cannot make the price infinite or NaN."""
FORESIGHT: Final = 1.0
"""Seconds of its work in which arriving requests count. Later ones go elsewhere, because the worker's load shows the work."""
STREAM_WEIGHT: Final = 0.04
"""Weight of a second by which a running stream is delayed, beside a second of TTFT. With twice as much the p99 of TTFT rises by 2 %."""


@dataclass(slots=True)
class ScoredWorker:
    """A living worker, and how many blocks of the prompt it holds (`depth`). `load_age`: seconds since its load was measured, which lacks
    `reserved_tokens`."""

    address: str
    block_tokens: int
    load: WorkerLoad
    load_age: float = 0.0
    reserved_tokens: float = 0.0
    depth: int = 0

    @property
    def backlog(self) -> float:
        return self.load.backlog_after(self.load_age)

    @property
    def tokens_ahead(self) -> float:
        return tokens_ahead(self.load, self.load_age, self.reserved_tokens)

    def ready_key(self, now: float) -> float:
        """Return its place in the order of the workers that can start a prompt soonest."""
        return ready_key(self.load, self.tokens_ahead, now)


@dataclass(slots=True)
class StartEstimate:
    """The estimated TTFT of one worker, in `seconds`. `cost`: prompt tokens to compute, in `work` seconds.

    `score` ranks workers: `seconds`, plus `price`, the delay of other requests. `backlog`: reported tokens less the work since.
    `reserved`: the other tokens ahead. `rate`: prefill tokens per second. `step`: seconds.
    """

    address: str
    cached: int
    cost: float
    work: float
    seconds: float
    price: float
    score: float
    fits: bool
    rank: int
    backlog: float
    reserved: float
    rate: float
    step: float

    def terms(self) -> dict[str, float]:
        """Return the terms whose sum is `score`, in seconds."""
        return {
            "backlog": self.backlog / self.rate,
            "reserved": self.reserved / self.rate,
            "work": self.work,
            "step": self.step,
            "price": self.price,
        }


def rank_candidates(workers: Iterable[ScoredWorker], hashes: bytes, prompt_tokens: int, request: bytes, wanted: int) -> list[StartEstimate]:
    """Return the `wanted` best workers for the prompt, best first. `hashes`: the prompt's blocks, packed. `request`: 8 random bytes.

    Of equals the lower rank wins: all routers give the first block without a holder the same ranks.
    """
    known = list(workers)
    blocks = len(hashes) // 8
    deepest = max((worker.depth for worker in known), default=0)
    block = deepest if deepest < blocks else deepest - 1  # the first block without a holder
    key = hashes[block * 8 : block * 8 + 8] if blocks else request
    costs = [_cost(worker, prompt_tokens) for worker in known]
    least = min((cost / worker.load.rate for worker, (_, cost) in zip(known, costs, strict=True)), default=0.0)
    mean = congestion(known)
    estimates = [_estimate(worker, prompt_tokens, *cost, key, mean, least) for worker, cost in zip(known, costs, strict=True)]
    return sorted(estimates, key=_order)[:wanted]


def congestion(workers: Sequence[ScoredWorker]) -> float:
    """Return the requests per worker that wait for a first token. A second of prefill delays about that many, by a second each."""
    return sum(map(_pending, workers)) / max(1, len(workers))


def delayed_arrivals(worker: ScoredWorker, work: float) -> float:
    """Return the requests that arrive while the worker computes `work` seconds, each counted by the share of it that delays it: a half."""
    return max(0.0, min(MAX_WAITING, worker.load.arrival_rate)) * min(work, FORESIGHT) / 2


def delayed_streams(worker: ScoredWorker) -> float:
    """Return the running streams that each second of prefill delays by about a second, weighted against requests without a first token."""
    return STREAM_WEIGHT * max(0.0, min(MAX_WAITING, worker.load.running) - (worker.load.backlog_tokens > 0))


def _pending(worker: ScoredWorker) -> float:
    """Return how many requests of the worker have no first token."""
    return max(0.0, min(MAX_WAITING, worker.load.waiting)) + (worker.load.backlog_tokens > 0)


def _cost(worker: ScoredWorker, prompt_tokens: int) -> tuple[int, int]:
    """Return the cached and the other tokens of the prompt; of those at least a block."""
    reusable = prompt_tokens - 1  # the last token is always computed for its logits, and only whole pages are reused
    if worker.load.page_size:
        reusable -= reusable % worker.load.page_size
    cached = max(0, min(worker.depth * worker.block_tokens, reusable))
    return cached, max(prompt_tokens - cached, worker.block_tokens)


def _price(worker: ScoredWorker, work: float, least: float, congestion: float) -> float:
    """Return the seconds by which the choice delays others: those without a first token by the work that another worker has done already.

    `least` is the work that every compared worker would have. With it in the price, prompts without reuse go where few requests wait, not
    where they start soonest, so the longest of them wait longest. Streams are delayed by all of the work.
    """
    extra, delayed = max(0.0, work - least), (_pending(worker) + congestion) / 2 + delayed_arrivals(worker, work)
    price = extra * delayed if extra and delayed else 0.0  # a forged rate can make the work infinite, and infinity times 0 is NaN
    streams = delayed_streams(worker)
    return price + (work * streams if streams else 0.0)


def _estimate(worker: ScoredWorker, prompt: int, cached: int, cost: int, key: bytes, congestion: float, least: float) -> StartEstimate:
    load, backlog, ahead = worker.load, worker.backlog, worker.tokens_ahead
    work, seconds = cost / load.rate, expected_ttft(load, ahead, cost)
    price = _price(worker, work, least, congestion)
    score, fits, rank, reserved = seconds + price, load.has_room(prompt - cached), _rank(worker.address, key), ahead - backlog
    return StartEstimate(
        worker.address, cached, cost, work, seconds, price, score, fits, rank, backlog, reserved, load.rate, load.step_seconds
    )


def _rank(address: str, key: bytes) -> int:
    """Rank by rendezvous: the key (8 bytes) scales and shifts the address' place on a circle; the lowest wins (multiply-add hashing)."""
    stretch, turn = int.from_bytes(key[:4], "little"), int.from_bytes(key[4:], "little")
    return (seed(address) * (stretch % (CIRCLE - 1) + 1) + turn % CIRCLE) % CIRCLE


@lru_cache(maxsize=4096)
def seed(address: str) -> int:
    """Return the place of an address on the circle."""
    return int(sha1(address.encode(), usedforsecurity=False).hexdigest()[:8], 16) % CIRCLE


def _order(start: StartEstimate) -> tuple[bool, float, int]:
    return (not start.fits, start.score, start.rank)
