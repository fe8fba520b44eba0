"""The routing policies by name."""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from fairlead.simulate.fleet import Fleet, InflightRequests, Placement
from fairlead.simulate.ours import Fairlead
from fairlead.simulate.peers import BoundedLoad, DynamoLike, KubeAiLeastLoad, LlmdLike, Random, RoundRobin, SglangLike
from fairlead.simulate.queues import Engine
from fairlead.simulate.router_view import RouterView
from fairlead.simulate.workloads.request import Request


class Policy(Protocol):
    def choose(self, request: Request, now: float) -> Placement:
        """Choose one of the usable pods, of which there is at least one."""


@runtime_checkable
class OwnPolicy(Policy, Protocol):
    """A policy of our routers, which know service classes."""

    @property
    def view(self) -> RouterView:
        """The router's table of workers."""

    def choose(self, request: Request, now: float, avoided: Collection[int] = ()) -> Placement:
        """`avoided`: pods that are chosen only if there is no other."""

    def release(self, reservation: bytes) -> None:
        """End a reservation."""

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
