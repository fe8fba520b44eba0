"""The routers' knowledge of modelled pods: the index, which all routers share, and each router's own in-flight requests."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fairlead.simulate.pods import Pod
from fairlead.simulate.workloads.request import Request
from fairlead_index.hashing import hashes_from_bytes
from fairlead_index.mirror.prefix_table import PrefixTable


@dataclass(slots=True, eq=False)
class InflightRequest:
    """A request in flight. `cost`: the prompt tokens that its router expected to be computed."""

    request: Request
    router: int
    pod: int
    cost: float
    reserved: bool
    """Whether it has a reservation in Redis, which every router sees."""
    waiting: bool = True
    """Whether it has no first token."""


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
            if flight.request.at <= since:
                break
            tokens += flight.cost * flight.reserved
        return tokens

    def drop(self, flight: InflightRequest) -> None:
        self.count[flight.pod] -= 1
        active = self.active[flight.pod]
        for block in flight.request.blocks:
            active[block] -= 1
            if not active[block]:
                del active[block]


class Fleet:
    """The pods, the exact index over them, and everything in flight."""

    def __init__(self, pods: list[Pod], block_tokens: int, routers: int = 1) -> None:
        self.pods = pods
        self.block_tokens = block_tokens
        self.inflight = InflightRequests(len(pods))
        # A single router has sent all requests.
        self.inflight_by_router = [InflightRequests(len(pods)) for _ in range(routers)] if routers > 1 else [self.inflight]
        self.table = PrefixTable()
        for number in range(len(pods)):
            self.table.join(_slot(number), str(number), 1)

    def depths(self, blocks: Sequence[int]) -> list[int]:
        """Return how many of the prompt's first blocks each pod caches, by the index."""
        found = self.table.match(blocks)
        return [found.get(str(number), 0) for number in range(len(self.pods))]

    def add_request(self, request: Request, router: int, pod: int, predicted: int, reserved: bool) -> InflightRequest:
        flight = InflightRequest(request, router, pod, max(request.prompt_tokens - predicted, 1), reserved)
        for known in self._known_to(router):
            known.add(flight)
        return flight

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

    def _known_to(self, router: int) -> list[InflightRequests]:
        return [self.inflight, self.inflight_by_router[router]] if len(self.inflight_by_router) > 1 else [self.inflight]


def choose_lowest(values: Sequence[float], draw: random.Random) -> int:
    """Return the pod with the lowest value, a random one of equals."""
    low = min(values)
    return draw.choice([number for number, value in enumerate(values) if value == low])


def _slot(number: int) -> bytes:
    return (number + 1).to_bytes(2, "big")
