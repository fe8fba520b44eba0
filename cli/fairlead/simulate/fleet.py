"""The routers' knowledge of modelled pods: the index, which all routers share, and each router's own in-flight requests."""

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fairlead.simulate.pods import Pod, Served
from fairlead.simulate.trace import Request
from fairlead_index.mirror.prefix_table import PrefixTable


@dataclass(slots=True)
class InflightRequest:
    """A request in flight. `cost`: the prompt tokens that its router expected to be computed."""

    pod: int
    sent_at: float
    cost: float
    blocks: "array[int]"
    reserved: bool
    """Whether it has a reservation in Redis, which every router sees."""
    waiting: bool = True


class InflightRequests:
    """The requests in flight at each pod, and how many of them use each block."""

    def __init__(self, pods: int) -> None:
        self.flights: list[dict[int, InflightRequest]] = [{} for _ in range(pods)]
        self.active: list[Counter[int]] = [Counter() for _ in range(pods)]

    def counts(self) -> list[int]:
        return [len(flights) for flights in self.flights]

    def pending(self, pod: int) -> float:
        """Return the prompt tokens of requests without a first token."""
        return sum(flight.cost for flight in self.flights[pod].values() if flight.waiting)

    def queued(self, pod: int) -> int:
        return sum(flight.waiting for flight in self.flights[pod].values())

    def add(self, flight: InflightRequest) -> None:
        self.flights[flight.pod][id(flight)] = flight
        self.active[flight.pod].update(flight.blocks)

    def drop(self, flight: InflightRequest) -> None:
        del self.flights[flight.pod][id(flight)]
        active = self.active[flight.pod]
        for block in flight.blocks:
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
        flight = InflightRequest(pod, request.at, max(request.prompt_tokens - predicted, 1), request.blocks, reserved)
        self.inflight.add(flight)
        if len(self.inflight_by_router) > 1:
            self.inflight_by_router[router].add(flight)
        return flight

    def record_first_token(self, flight: InflightRequest, served: Served) -> None:
        """Record the first token of a request, and update the index with the stored and evicted blocks."""
        flight.waiting = False
        self.table.store(_slot(flight.pod), served.stored)
        self.table.remove(_slot(flight.pod), served.evicted)

    def end_request(self, flight: InflightRequest, router: int) -> None:
        self.inflight.drop(flight)
        if len(self.inflight_by_router) > 1:
            self.inflight_by_router[router].drop(flight)


def choose_lowest(values: Sequence[float], draw: random.Random) -> int:
    """Return the pod with the lowest value, a random one of equals."""
    low = min(values)
    return draw.choice([number for number, value in enumerate(values) if value == low])


def _slot(number: int) -> bytes:
    return (number + 1).to_bytes(2, "big")
