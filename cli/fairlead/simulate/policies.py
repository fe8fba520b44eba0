"""Who gets a request: our score, and other routers' policies as their documents describe them, simplified to what decides.

Every policy sees the same exact index and its own account of what it has sent, without delay, which is to the others' favour:
ours alone sees loads as old as a worker's reports make them.
"""

import bisect
import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Protocol

from fairlead.simulate.pods import Pod, Served
from fairlead.simulate.trace import Request
from fairlead_index.hashing import hash_bytes
from fairlead_index.score import ScoredWorker, best_starts
from fairlead_index.table import PrefixTable
from fairlead_router.alone import home_block

ARRIVAL_SECONDS = 0.25  # route.lua: a reservation older than the load by this much is in it


@dataclass(slots=True)
class Flight:
    """A request on its way: `cost` are the prompt tokens that its router expected to be computed."""

    pod: int
    sent_at: float
    cost: float
    blocks: "array[int]"
    waiting: bool = True


class Fleet:
    """What a router can know: the index, and what was sent where."""

    def __init__(self, pods: list[Pod], block_tokens: int) -> None:
        self.pods = pods
        self.block_tokens = block_tokens
        self.flights: list[dict[int, Flight]] = [{} for _ in pods]
        self.active: list[Counter[int]] = [Counter() for _ in pods]  # blocks of the requests in flight, and how many share each
        self.table = PrefixTable()
        for number in range(len(pods)):
            self.table.join(_slot(number), str(number), 1)

    def depths(self, blocks: Sequence[int]) -> list[int]:
        """Blocks of the prompt that the index names for each pod."""
        found = self.table.match(blocks)
        return [found.get(str(number), 0) for number in range(len(self.pods))]

    def in_flight(self) -> list[int]:
        """Requests of each pod that have not ended."""
        return [len(flights) for flights in self.flights]

    def least(self, values: Sequence[float], draw: random.Random) -> int:
        """A pod of the lowest value, any of equals."""
        low = min(values)
        return draw.choice([number for number, value in enumerate(values) if value == low])

    def sent(self, request: Request, pod: int, predicted: int) -> Flight:
        flight = Flight(pod, request.at, max(request.prompt_tokens - predicted, 1), request.blocks)
        self.active[pod].update(request.blocks)
        self.flights[pod][id(flight)] = flight
        return flight

    def started(self, flight: Flight, served: Served) -> None:
        """The first token is there, and the prompt's blocks are in the index."""
        flight.waiting = False
        self.table.stored(_slot(flight.pod), served.came)
        self.table.removed(_slot(flight.pod), served.went)

    def ended(self, flight: Flight) -> None:
        del self.flights[flight.pod][id(flight)]
        active = self.active[flight.pod]
        for block in flight.blocks:
            active[block] -= 1
            if not active[block]:
                del active[block]


def _slot(number: int) -> bytes:
    return (number + 1).to_bytes(2, "big")


class Policy(Protocol):
    def choose(self, request: Request) -> tuple[int, int]:
        """The pod, and the prompt tokens expected in its cache."""


class Fairlead:
    """Expected time to the first token: the score that route.lua computes, from reported loads and reservations."""

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._fleet, self._draw = fleet, draw

    def choose(self, request: Request) -> tuple[int, int]:
        fleet, now = self._fleet, request.at
        workers = []
        for number, (pod, depth) in enumerate(zip(fleet.pods, fleet.depths(request.blocks), strict=True)):
            at, backlog = pod.load(now)
            owed = sum(f.cost for f in fleet.flights[number].values() if f.waiting and f.sent_at > at - ARRIVAL_SECONDS)
            model = pod.model
            worker = ScoredWorker(str(number), fleet.block_tokens, depth, owed, backlog, model.rate, model.step_seconds, now - at)
            workers.append(worker)
        blocks = request.blocks[: request.prompt_tokens // fleet.block_tokens]
        best = best_starts(workers, hash_bytes(blocks), request.prompt_tokens, self._draw.randbytes(8), 1)[0]
        return int(best.address), best.cached


class Alone:
    """Our router while Redis is away: the same score without cached prefixes, by the workers' loads and what was sent and not answered."""

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._fleet, self._draw = fleet, draw

    def choose(self, request: Request) -> tuple[int, int]:
        workers = []
        for number, pod in enumerate(self._fleet.pods):
            at, reported = pod.load(request.at)
            model = pod.model
            backlog = max(0.0, reported - model.rate * (request.at - at))
            pending = sum(flight.cost for flight in self._fleet.flights[number].values() if flight.waiting)
            workers.append(ScoredWorker(str(number), 1, 0, max(0.0, pending - backlog), backlog, model.rate, model.step_seconds))
        blocks = request.blocks[: request.prompt_tokens // self._fleet.block_tokens]
        home = hash_bytes(home_block(blocks, request.prompt_tokens))
        return int(best_starts(workers, home, request.prompt_tokens, self._draw.randbytes(8), 1)[0].address), 0


class RoundRobin:
    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._next, self._count = 0, len(fleet.pods)

    def choose(self, request: Request) -> tuple[int, int]:
        self._next += 1
        return self._next % self._count, 0


class Random:
    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._draw, self._count = draw, len(fleet.pods)

    def choose(self, request: Request) -> tuple[int, int]:
        return self._draw.randrange(self._count), 0


class LeastLoad:
    """The fewest requests in flight."""

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._fleet, self._draw = fleet, draw

    def choose(self, request: Request) -> tuple[int, int]:
        return self._fleet.least(self._fleet.in_flight(), self._draw), 0


class BoundedLoad:
    """Consistent hashing with bounded loads (KubeAI): the first pod on the ring that has at most 1.25 times the mean load.

    The key is the second block, for all prompts of the conversation trace share the first.
    """

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._fleet = fleet
        points = [(_point(f"{number}/{copy}"), number) for number in range(len(fleet.pods)) for copy in range(256)]
        self._ring = sorted(points)

    def choose(self, request: Request) -> tuple[int, int]:
        loads = self._fleet.in_flight()
        most = 1.25 * (sum(loads) + 1) / len(loads)
        start = bisect.bisect(self._ring, (_point(str(list(request.blocks[:2])[-1:])), 0))
        for step in range(len(self._ring)):
            number = self._ring[(start + step) % len(self._ring)][1]
            if loads[number] + 1 <= most:
                return number, 0
        return min(range(len(loads)), key=loads.__getitem__), 0


def _point(text: str) -> int:
    return int.from_bytes(sha1(text.encode(), usedforsecurity=False).digest()[:8], "big")


class SglangLike:
    """sglang-router's cache_aware: a tree of its own routings; the least loaded when loads differ by 64 and by half, else the longest match
    of at least 0.3 of the prompt, else the pod with the smallest tree."""

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._fleet, self._draw = fleet, draw
        self._trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in fleet.pods]

    def choose(self, request: Request) -> tuple[int, int]:
        loads = self._fleet.in_flight()
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            number = self._fleet.least(loads, self._draw)
        else:
            matched = [self._depth(tree, request) for tree in self._trees]
            if max(matched) > 0.3 * len(request.blocks):
                number = matched.index(max(matched))
            else:
                number = self._fleet.least([len(tree) for tree in self._trees], self._draw)
        tree = self._trees[number]
        for block in reversed(request.blocks):
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > self._fleet.pods[number].model.cache_blocks:
            tree.popitem(last=False)
        return number, 0

    def _depth(self, tree: "OrderedDict[int, None]", request: Request) -> int:
        return next((at for at, block in enumerate(request.blocks) if block not in tree), len(request.blocks))


class DynamoLike:
    """Dynamo's KV router at temperature 0: the least of waiting prefill with this one's, in blocks, and active decode blocks."""

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._fleet, self._draw = fleet, draw

    def choose(self, request: Request) -> tuple[int, int]:
        fleet = self._fleet
        depths = fleet.depths(request.blocks)
        costs = []
        for number, depth in enumerate(depths):
            flights = fleet.flights[number].values()
            prefill = sum(f.cost for f in flights if f.waiting) + max(0, request.prompt_tokens - depth * fleet.block_tokens)
            active = fleet.active[number]
            costs.append(prefill / fleet.block_tokens + len(active) + sum(block not in active for block in request.blocks))
        number = fleet.least(costs, self._draw)
        return number, min(depths[number] * fleet.block_tokens, request.prompt_tokens - 1)


class LlmdLike:
    """llm-d's scorers: 3 x the share of the prompt that is held, 2 x queue, 2 x KV use, each 0 to 1; the least recently used on no hit."""

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._fleet, self._draw = fleet, draw
        self._used = [0] * len(fleet.pods)
        self._clock = 0

    def choose(self, request: Request) -> tuple[int, int]:
        fleet = self._fleet
        depths = fleet.depths(request.blocks)
        queues = [sum(f.waiting for f in flights.values()) for flights in fleet.flights]
        longest, low, high = max(depths), min(queues), max(queues)
        scores = []
        for number, depth in enumerate(depths):
            kv = 1 - min(1.0, len(fleet.active[number]) / fleet.pods[number].model.cache_blocks)
            queue = (high - queues[number]) / (high - low) if high > low else 1.0
            scores.append(3 * depth / max(1, len(request.blocks)) + 2 * queue + 2 * kv)
        best = max(scores)
        number = min((n for n, score in enumerate(scores) if score == best), key=self._used.__getitem__)
        if not longest:
            self._clock += 1
            self._used[number] = self._clock
        return number, min(depths[number] * fleet.block_tokens, request.prompt_tokens - 1)


POLICIES: dict[str, Callable[[Fleet, random.Random], Policy]] = {
    "fairlead": Fairlead,
    "fairlead-alone": Alone,
    "round-robin": RoundRobin,
    "random": Random,
    "least-load": LeastLoad,
    "bounded-load": BoundedLoad,
    "sglang-like": SglangLike,
    "dynamo-like": DynamoLike,
    "llm-d-like": LlmdLike,
}
