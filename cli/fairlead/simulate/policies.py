"""The routing policies by name."""

import random
from collections.abc import Callable
from typing import Protocol

from fairlead.simulate.fleet import Fleet, InflightRequests
from fairlead.simulate.ours import Fairlead, WithoutRedis
from fairlead.simulate.peers import BoundedLoad, DynamoLike, LeastLoad, LlmdLike, Random, RoundRobin, SglangLike
from fairlead.simulate.workloads.request import Request


class Policy(Protocol):
    @property
    def reserves(self) -> bool:
        """Whether its last choice made a reservation that every router sees."""

    def choose(self, request: Request) -> tuple[int, int]:
        """Return the pod and the prompt tokens expected in its cache."""


Maker = Callable[[Fleet, InflightRequests, random.Random], Policy]
"""Creates a policy of one router from the fleet, that router's in-flight requests, and a random generator."""

OURS: dict[str, Maker] = {"fairlead": Fairlead, "fairlead-no-redis": WithoutRedis}

POLICIES: dict[str, Maker] = {
    **OURS,
    "round-robin": RoundRobin,
    "random": Random,
    "least-load": LeastLoad,
    "bounded-load": BoundedLoad,
    "sglang-like": SglangLike,
    "dynamo-like": DynamoLike,
    "llm-d-like": LlmdLike,
}
