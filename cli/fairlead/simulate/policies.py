"""Who gets a request: every policy by its name."""

import random
from collections.abc import Callable
from typing import Protocol

from fairlead.simulate.fleet import Account, Fleet
from fairlead.simulate.ours import Fairlead, WithoutRedis
from fairlead.simulate.peers import BoundedLoad, DynamoLike, LeastLoad, LlmdLike, Random, RoundRobin, SglangLike
from fairlead.simulate.trace import Request


class Policy(Protocol):
    @property
    def reserves(self) -> bool:
        """Whether its last choice was reserved where every router sees it."""

    def choose(self, request: Request) -> tuple[int, int]:
        """The pod, and the prompt tokens expected in its cache."""


Maker = Callable[[Fleet, Account, random.Random], Policy]
"""Makes a policy for one router: with the fleet, that router's own account, and chance."""

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
