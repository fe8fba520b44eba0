"""The routing policies by name."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fairlead.simulate.fleet import Fleet, InflightRequests, Placement
from fairlead.simulate.ours import Fairlead
from fairlead.simulate.peers import BoundedLoad, DynamoLike, KubeAiLeastLoad, LlmdLike, Random, RoundRobin, SglangLike
from fairlead.simulate.queues import Engine
from fairlead.simulate.workloads.request import Request


class Policy(Protocol):
    def choose(self, request: Request) -> Placement:
        """Choose one of the usable pods, of which there is at least one."""


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
    "fairlead-no-redis": System(partial(Fairlead, has_index=False), "fairlead", has_queue=True, is_peer=False),
    "fairlead-fcfs": System(Fairlead, "fairlead-fcfs", is_peer=False),
    "round-robin": System(RoundRobin),
    "random": System(Random),
    "least-load": System(KubeAiLeastLoad),
    "bounded-load": System(BoundedLoad),
    "sglang-like": System(SglangLike),
    "dynamo-like": System(DynamoLike),
    "llm-d-like": System(LlmdLike),
}
"""`fairlead-fcfs`: the same score with the order of arrival and without our routers' queue, to show what these are worth."""
