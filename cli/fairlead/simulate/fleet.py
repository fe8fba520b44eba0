"""The routers' knowledge of modelled pods: the index, which all routers share, and each router's own in-flight requests."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fairlead.simulate.pods import Pod
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request
from fairlead_index.hashing import hashes_from_bytes
from fairlead_index.mirror.prefix_table import PrefixTable


@dataclass(slots=True)
class Clock:
    """The time of the replay, in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Placement:
    """A router's choice. `cached`: prompt tokens expected in the pod's cache. `reservation`: one in Redis, which every router sees."""

    pod: int
    cached: int = 0
    reservation: bytes = b""


@dataclass(slots=True, eq=False)
class InflightRequest:
    """A request in flight. `cost`: the prompt tokens that its router expected to be computed. `position`: in the workload."""

    request: Request
    position: int
    router: int
    pod: int
    sent_at: float
    cost: int
    reservation: bytes
    waiting: bool = True
    """Whether it has no first token."""
    first_token_at: float = 0.0
    cached: int = 0
    """Prompt tokens that its pod had cached, once it has its first token."""
    number: int = -1
    """Its number at the pod."""


class InflightRequests:
    """The requests in flight at each pod, and how many of them use each block."""

    def __init__(self, pods: int) -> None:
        self.count = [0] * pods
        self.waiting: list[dict[InflightRequest, None]] = [{} for _ in range(pods)]
        """Requests without a first token, oldest first."""
        self.pending = [0.0] * pods
        """Their prompt tokens."""
        self.active: list[Counter[int]] = [Counter() for _ in range(pods)]

    def add(self, flight: InflightRequest) -> None:
        self.count[flight.pod] += 1
        self.waiting[flight.pod][flight] = None
        self.pending[flight.pod] += flight.cost
        self.active[flight.pod].update(flight.request.blocks)

    def record_first_token(self, flight: InflightRequest) -> None:
        del self.waiting[flight.pod][flight]
        self.pending[flight.pod] -= flight.cost

    def reserved(self, pod: int, since: float) -> float:
        """Return the prompt tokens of reservations after a moment, without those of requests that have their first token."""
        tokens = 0.0
        for flight in reversed(self.waiting[pod]):
            if flight.sent_at <= since:
                break
            tokens += flight.cost if flight.reservation else 0.0
        return tokens

    def drop(self, flight: InflightRequest) -> None:
        """Forget a request that has ended."""
        if flight.waiting:
            self.record_first_token(flight)
        self.count[flight.pod] -= 1
        active = self.active[flight.pod]
        for block in flight.request.blocks:
            active[block] -= 1
            if not active[block]:
                del active[block]


class Fleet:
    """The pods by number, the exact index over them, and everything in flight.

    `usable`: the pods that routers may choose; the others start, drain or do not exist.
    """

    def __init__(self, make_pod: Callable[[float], Pod], pods: int, most: int, routers: int = 1) -> None:
        self.clock = Clock()
        self._make_pod = make_pod
        self.pods = [make_pod(0.0) for _ in range(most)]
        self.usable = list(range(pods))
        self.inflight = InflightRequests(most)
        # A single router has sent all requests.
        self.inflight_by_router = [InflightRequests(most) for _ in range(routers)] if routers > 1 else [self.inflight]
        self.num_routers = routers
        self.addresses = [f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8000" for number in range(most)]
        self.number_of = {address: number for number, address in enumerate(self.addresses)}
        self.table = PrefixTable()
        for number in self.usable:
            self.table.join(_slot(number), self.addresses[number], BLOCK_TOKENS)

    def depths(self, blocks: Sequence[int]) -> list[int]:
        """Return how many of the prompt's first blocks each pod caches, by the index."""
        found = self.table.match(blocks)
        return [found.get(address, 0) // BLOCK_TOKENS for address in self.addresses]

    def add_request(self, flight: InflightRequest) -> None:
        for known in self._known_to(flight.router):
            known.add(flight)

    def record_first_token(self, flight: InflightRequest) -> None:
        flight.waiting = False
        for known in self._known_to(flight.router):
            known.record_first_token(flight)

    def end_request(self, flight: InflightRequest) -> None:
        for known in self._known_to(flight.router):
            known.drop(flight)

    def update_index(self, pod: int) -> None:
        """Apply what the pod has stored, promised and removed."""
        for event in self.pods[pod].drain_events():
            (self.table.store if event.kind == "stored" else self.table.remove)(_slot(pod), hashes_from_bytes(event.hashes))

    def open(self, pod: int) -> None:
        """Put a new pod with an empty cache into service."""
        self.pods[pod] = self._make_pod(self.clock.now)
        self.table.join(_slot(pod), self.addresses[pod], BLOCK_TOKENS)
        self.usable = sorted({*self.usable, pod})

    def drain(self, pod: int) -> None:
        """Send the pod no more requests."""
        self.usable = [number for number in self.usable if number != pod]

    def close(self, pod: int) -> None:
        """Remove the pod and its cache."""
        self.drain(pod)
        self.table.end(_slot(pod))

    def _known_to(self, router: int) -> list[InflightRequests]:
        return [self.inflight, self.inflight_by_router[router]] if len(self.inflight_by_router) > 1 else [self.inflight]


def choose_lowest(numbers: Iterable[int], value_of: Callable[[int], float], draw: random.Random) -> int:
    """Return the pod with the lowest value, a random one of equals."""
    values = {number: value_of(number) for number in numbers}
    low = min(values.values())
    return draw.choice([number for number, value in values.items() if value == low])


def _slot(number: int) -> bytes:
    return (number + 1).to_bytes(2, "big")
