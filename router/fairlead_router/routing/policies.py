"""Routing policies by the router's own view of the workers. `PrefixAware` is in prefix_aware.py."""

import random
from array import array
from collections.abc import Collection, Mapping, Sequence
from time import monotonic
from typing import Protocol

import msgspec
import xxhash

from fairlead_index.score import CONSIDERED, StartEstimate
from fairlead_router.fleet.workers import Worker, WorkerTable

Tried = Collection[tuple[str, int]]
"""(address, generation) of the workers that this request was sent to."""

REQUEST_SECONDS = 1e-3
"""Wait for each request of this router that its worker's last report does not show: it makes the steps longer than reported."""


class RoutingRequest(msgspec.Struct, frozen=True):
    """Properties of a request that a policy may depend on."""

    prompt_tokens: int = 0
    hashes: Sequence[int] = msgspec.field(default_factory=lambda: array("Q"))
    """Block hashes of the prompt; empty where it is shorter than a block or was not tokenized."""
    session: str = ""
    model: str = ""
    """Model name that the worker must serve, if not all workers do: an adapter, or a model while a rollout renames it."""
    format_tag: str = ""
    """Prompt format that `hashes` were computed with."""
    conversation: int = 0
    """Number that all requests of a conversation share; 0: unknown."""
    adapter: str = ""
    """Digest of the LoRA adapter that `hashes` belong to; empty: none."""
    other_hashes: Mapping[str, Sequence[int]] = msgspec.field(default_factory=dict)
    """Block hashes of the same tokens in the other formats that workers have, by tag: another engine's blocks, or another model's."""
    is_retry: bool = False
    """An earlier attempt of this request has failed."""

    @property
    def chains(self) -> list[Sequence[int]]:
        """Return the block hashes in each format. A worker holds blocks of one."""
        return [self.hashes, *self.other_hashes.values()]

    def hashes_of(self, worker: Worker | None) -> Sequence[int]:
        """Return the block hashes in the format of a worker; of one that is not known, those of most workers."""
        return self.hashes if worker is None else self.other_hashes.get(worker.format_tag, self.hashes)

    def is_for(self, worker: Worker) -> bool:
        """Return whether there are block hashes in the format of a worker. A worker without a known format may have that of `hashes`."""
        return not (worker.format_tag and self.format_tag) or worker.format_tag in (self.format_tag, *self.other_hashes)


class Choice(msgspec.Struct, frozen=True):
    worker: Worker
    predicted: int | None = None
    """Cached tokens that the worker is expected to find; None if the index was not used."""
    in_flight: int = 0
    """Those of `predicted` that the index does not show: the worker computes them for another request of this router."""
    is_outdated: bool = False
    """Whether the prediction was made without Redis: an error is no fault of the index."""
    reservation: bytes | None = None
    """Reservation that `release` ends; empty or None: nothing was reserved."""
    candidates: Sequence[StartEstimate] = ()
    """The compared workers, best first; empty unless they are kept for the web console."""

    @property
    def indexed(self) -> int | None:
        """Cached tokens that the worker holds by the index; None if the index was not used."""
        return None if self.predicted is None else self.predicted - self.in_flight


class Policy(Protocol):
    def start(self) -> None:
        """Start background tasks on the running loop."""

    async def choose(self, request: RoutingRequest, tried: Tried) -> Choice | None:
        """Return a worker for the request; None while there is none. Never raises."""

    def release(self, choice: Choice) -> None:
        """End the choice's reservation, if any: the answer has begun or the attempt has failed."""

    def record_answer(self, request: RoutingRequest, choice: Choice, cached: int) -> None:
        """Record that the worker found `cached` tokens of the prompt in its cache."""

    async def close(self) -> None: ...


def least_loaded(workers: Sequence[Worker]) -> Worker:
    """Return the worker with the shortest expected wait. Ties are random, so that routers with the same view do not herd.

    Short prompts are computed before the next report. Without REQUEST_SECONDS all of them would go where the last step was shortest.
    """
    now = monotonic()

    def wait(worker: Worker) -> float:
        unreported = max(0, worker.in_flight - worker.load.running - worker.load.waiting)
        return worker.expected_ttft(now) + REQUEST_SECONDS * unreported

    return min(workers, key=lambda worker: (wait(worker), random.random()))


class IndexFreePolicy:
    """Base of the policies without an index; their only state is the worker table."""

    def __init__(self, table: WorkerTable) -> None:
        self._table = table

    def start(self) -> None:
        pass

    async def choose(self, request: RoutingRequest, tried: Tried) -> Choice | None:
        workers = self._table.usable(tried, request.model)
        return Choice(self.pick(request, tried, workers)) if workers else None

    def pick(self, request: RoutingRequest, tried: Tried, workers: Sequence[Worker]) -> Worker:
        return least_loaded(self._table.soonest(CONSIDERED, tried, request.model))

    def release(self, choice: Choice) -> None:
        pass

    def record_answer(self, request: RoutingRequest, choice: Choice, cached: int) -> None:
        pass

    async def close(self) -> None:
        pass


class LeastLoad(IndexFreePolicy):
    """The worker with the shortest expected wait."""


class Random(IndexFreePolicy):
    def pick(self, request: RoutingRequest, tried: Tried, workers: Sequence[Worker]) -> Worker:
        return random.choice(workers)


class RoundRobin(IndexFreePolicy):
    def __init__(self, table: WorkerTable) -> None:
        super().__init__(table)
        self._next = 0

    def pick(self, request: RoutingRequest, tried: Tried, workers: Sequence[Worker]) -> Worker:
        self._next += 1
        return workers[self._next % len(workers)]


class Session(IndexFreePolicy):
    """The same worker for each `X-Session-Id` or `user`, from every router; least load for requests without either."""

    def pick(self, request: RoutingRequest, tried: Tried, workers: Sequence[Worker]) -> Worker:
        place = xxhash.xxh3_64_intdigest(request.session.encode())
        home = self._table.home(place, self._table.eligible_addresses(tried, request.model)) if request.session else None
        return home or super().pick(request, tried, workers)
