"""How a worker is chosen by the router's own picture: four policies. PrefixAware is in steering.py."""

import random
from array import array
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec
import xxhash

from fairlead_index.score import CONSIDERED
from fairlead_router.fleet.workers import Worker, WorkerTable

Tried = Collection[tuple[str, int]]
"""(address, life) of the workers that this request has been sent to."""


class RoutingRequest(msgspec.Struct, frozen=True):
    """What a choice may depend on."""

    prompt_tokens: int = 0
    hashes: Sequence[int] = msgspec.field(default_factory=lambda: array("Q"))
    """Block hashes of the prompt; empty where it is shorter than a block or was not tokenized."""
    session: str = ""
    model: str = ""
    """The name that a worker must answer to, where not all of them do: an adapter's, or a model's while a rollout renames it."""
    format_tag: str = ""
    """The prompt format that `hashes` are of."""
    conversation: int = 0
    """The same for all requests of a conversation; 0: unknown."""
    adapter: str = ""
    """Digest of the LoRA adapter that `hashes` are of; empty: none."""
    is_retry: bool = False
    """An earlier attempt of this request has failed."""


class Choice(msgspec.Struct, frozen=True):
    worker: Worker
    predicted: int | None = None
    """Cached tokens that the index expects there; None where it was not asked."""
    reservation: bytes | None = None
    """What `release` gives back; empty or None: nothing was reserved."""


class Policy(Protocol):
    def start(self) -> None:
        """Begin what goes on beside the requests, on the running loop."""

    async def choose(self, wanted: RoutingRequest, tried: Tried) -> Choice | None:
        """A worker for the request, None while there is none. Never fails."""

    def release(self, choice: Choice) -> None:
        """The answer has begun or the attempt has failed: a reservation, if any, ends."""

    def record_answer(self, wanted: RoutingRequest, choice: Choice, cached: int) -> None:
        """The worker found `cached` tokens of the prompt in its cache."""

    async def close(self) -> None: ...


def least_loaded(workers: Sequence[Worker]) -> Worker:
    """The shortest expected wait; chance among equals, so that routers that see the same picture do not all choose the same one."""
    return min(workers, key=lambda worker: (worker.expected_wait(), random.random()))


class IndexFreePolicy:
    """What the four share: they hold nothing between requests but the table."""

    def __init__(self, table: WorkerTable) -> None:
        self._table = table

    def start(self) -> None:
        pass

    async def choose(self, wanted: RoutingRequest, tried: Tried) -> Choice | None:
        workers = self._table.usable(tried, wanted.model)
        return Choice(self.pick(wanted, tried, workers)) if workers else None

    def pick(self, wanted: RoutingRequest, tried: Tried, workers: Sequence[Worker]) -> Worker:
        return least_loaded(self._table.soonest(CONSIDERED, tried, wanted.model))

    def release(self, choice: Choice) -> None:
        pass

    def record_answer(self, wanted: RoutingRequest, choice: Choice, cached: int) -> None:
        pass

    async def close(self) -> None:
        pass


class LeastLoad(IndexFreePolicy):
    """The worker with the shortest expected wait."""


class Random(IndexFreePolicy):
    def pick(self, wanted: RoutingRequest, tried: Tried, workers: Sequence[Worker]) -> Worker:
        return random.choice(workers)


class RoundRobin(IndexFreePolicy):
    def __init__(self, table: WorkerTable) -> None:
        super().__init__(table)
        self._turn = 0

    def pick(self, wanted: RoutingRequest, tried: Tried, workers: Sequence[Worker]) -> Worker:
        self._turn += 1
        return workers[self._turn % len(workers)]


class Session(IndexFreePolicy):
    """One worker for each `X-Session-Id` or `user`, the same from every router; least load for requests without either."""

    def pick(self, wanted: RoutingRequest, tried: Tried, workers: Sequence[Worker]) -> Worker:
        place = xxhash.xxh3_64_intdigest(wanted.session.encode())
        home = self._table.home(place, self._table.eligible_addresses(tried, wanted.model)) if wanted.session else None
        return home or super().pick(wanted, tried, workers)
