"""The routing policies by name."""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fairlead.simulate.fleet import Fleet, InflightRequests
from fairlead.simulate.ours import Fairlead, WithoutRedis
from fairlead.simulate.peers import BoundedLoad, DynamoLike, LeastLoad, LlmdLike, Random, RoundRobin, SglangLike
from fairlead.simulate.queues import Engine
from fairlead.simulate.workloads.request import Request
from fairlead_index.score import StartEstimate


class Policy(Protocol):
    @property
    def reserves(self) -> bool:
        """Whether its last choice made a reservation that every router sees."""

    def choose(self, request: Request, now: float) -> tuple[int, int]:
        """Return one of the usable pods, of which there is at least one, and the prompt tokens expected in its cache."""


@runtime_checkable
class RankingPolicy(Policy, Protocol):
    """A policy with a score, by which requests that wait at a pod move to another one."""

    def choose(self, request: Request, now: float, tried: Collection[int] = ()) -> tuple[int, int]:
        """`tried`: pods that the request was withdrawn from."""

    def rank(self, request: Request, now: float) -> dict[int, StartEstimate]:
        """Return the estimate of each usable pod."""

    def prefill_seconds(self, pod: int, now: float) -> float:
        """Return the seconds of prefill ahead at a pod as all routers together know it; 0: not known."""


Maker = Callable[[Fleet, InflightRequests, random.Random], Policy]
"""Creates a policy of one router from the fleet, that router's in-flight requests, and a random generator."""


@dataclass(frozen=True, slots=True)
class System:
    """A policy, the engine behind it, and whether its routers have our queue in front of the pods."""

    make: Maker
    engine: Engine = "fcfs"
    has_queue: bool = False
    is_peer: bool = True


POLICIES: dict[str, System] = {
    "fairlead": System(Fairlead, "fairlead", has_queue=True, is_peer=False),
    "fairlead-no-redis": System(WithoutRedis, "fairlead", has_queue=True, is_peer=False),
    "fairlead-fcfs": System(Fairlead, "fairlead-fcfs", is_peer=False),
    "round-robin": System(RoundRobin),
    "random": System(Random),
    "least-load": System(LeastLoad),
    "bounded-load": System(BoundedLoad),
    "sglang-like": System(SglangLike),
    "dynamo-like": System(DynamoLike),
    "llm-d-like": System(LlmdLike),
}
"""`fairlead-fcfs`: the same score with the order of arrival and without our routers' queue, to show what these are worth."""
