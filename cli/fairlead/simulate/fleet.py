"""What routers can know of modelled pods: the index, which all of them share, and each one's own account of what it has sent."""

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fairlead.simulate.pods import Pod, Served
from fairlead.simulate.trace import Request
from fairlead_index.mirror.prefix_table import PrefixTable


@dataclass(slots=True)
class Flight:
    """A request on its way: `cost` are the prompt tokens that its router expected to be computed."""

    pod: int
    sent_at: float
    cost: float
    blocks: "array[int]"
    reserved: bool
    """In Redis, so that every router knows of it."""
    waiting: bool = True


class Account:
    """Requests in flight at each pod, and how many of them hold each block."""

    def __init__(self, pods: int) -> None:
        self.flights: list[dict[int, Flight]] = [{} for _ in range(pods)]
        self.active: list[Counter[int]] = [Counter() for _ in range(pods)]

    def counts(self) -> list[int]:
        return [len(flights) for flights in self.flights]

    def pending(self, pod: int) -> float:
        """Prompt tokens of requests whose answer has not begun."""
        return sum(flight.cost for flight in self.flights[pod].values() if flight.waiting)

    def queued(self, pod: int) -> int:
        return sum(flight.waiting for flight in self.flights[pod].values())

    def add(self, flight: Flight) -> None:
        self.flights[flight.pod][id(flight)] = flight
        self.active[flight.pod].update(flight.blocks)

    def drop(self, flight: Flight) -> None:
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
        self.everything = Account(len(pods))
        # With one router its account is all there is.
        self.accounts = [Account(len(pods)) for _ in range(routers)] if routers > 1 else [self.everything]
        self.table = PrefixTable()
        for number in range(len(pods)):
            self.table.join(_slot(number), str(number), 1)

    def depths(self, blocks: Sequence[int]) -> list[int]:
        """Blocks of the prompt that the index names for each pod."""
        found = self.table.match(blocks)
        return [found.get(str(number), 0) for number in range(len(self.pods))]

    def sent(self, request: Request, router: int, pod: int, predicted: int, reserved: bool) -> Flight:
        flight = Flight(pod, request.at, max(request.prompt_tokens - predicted, 1), request.blocks, reserved)
        self.everything.add(flight)
        if len(self.accounts) > 1:
            self.accounts[router].add(flight)
        return flight

    def started(self, flight: Flight, served: Served) -> None:
        """The first token is there, and the prompt's blocks are in the index."""
        flight.waiting = False
        self.table.store(_slot(flight.pod), served.came)
        self.table.remove(_slot(flight.pod), served.went)

    def ended(self, flight: Flight, router: int) -> None:
        self.everything.drop(flight)
        if len(self.accounts) > 1:
            self.accounts[router].drop(flight)


def least(values: Sequence[float], draw: random.Random) -> int:
    """A pod of the lowest value, any of equals."""
    low = min(values)
    return draw.choice([number for number, value in enumerate(values) if value == low])


def _slot(number: int) -> bytes:
    return (number + 1).to_bytes(2, "big")
