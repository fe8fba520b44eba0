"""The queue of a modelled pod: the engine's own, or first come, first served as in vLLM and SGLang."""

import sys
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Literal, Protocol

from fairlead_common.scheduling_policy import PolicyName
from fairlead_worker.cache.node import Node
from fairlead_worker.cache.prefix import Lease, PrefixCache
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.queue.waiting_queue import WaitingQueue
from fairlead_worker.scheduler.request import Request

Engine = Literal["fairlead", "fairlead-fcfs", "fcfs"]
"""`fairlead`: this project's engine. `fairlead-fcfs`: the same, ordered by arrival. `fcfs`: vLLM and SGLang with their defaults, by arrival
and LRU eviction that ignores the queue."""
ORDER: PolicyName = "lpm"
"""Default of `--scheduling-policy`."""
PAGE = 2
"""Engine tokens per block of a prompt: the block's hash as two uint32. So the engine's page is one block, and sizes are in half blocks."""
NO_LIMIT = sys.maxsize
"""The engine bounds the work of a step, of some 50 ms. The model decides only where a prompt begins or ends."""

PagesOf = Callable[[Request], int]
"""Return the pages that a request needs for its prompt and its whole output."""


class PodQueue(Protocol):
    @property
    def tokens(self) -> int:
        """Engine tokens of all waiting requests."""

    def __len__(self) -> int: ...

    def add(self, request: Request) -> None: ...

    def take(self, pages_of: PagesOf) -> tuple[Request, Lease] | None:
        """Remove the next request that fits. Return it with a lease on the cached pages of its prompt; None if no request fits."""


class FairleadQueue:
    """The engine's `WaitingQueue`: its order, and promises to the index."""

    def __init__(self, cache: PrefixCache, capacity: int, order: PolicyName) -> None:
        config = SchedulerConfig(
            max_model_len=PAGE * capacity,
            policy=order,
            match_refresh_limit=NO_LIMIT,
            promise_limit=NO_LIMIT,
            promise_tokens=NO_LIMIT,
        )
        self._cache, self._queue = cache, WaitingQueue(config, cache)

    @property
    def tokens(self) -> int:
        """Uncached engine tokens of all waiting requests."""
        self._queue.refresh()
        return self._queue.tokens

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> None:
        self._queue.add(request)
        self._queue.promise()

    def take(self, pages_of: PagesOf) -> tuple[Request, Lease] | None:
        self._queue.refresh()
        with closing(self._queue.candidates()) as candidates:
            for request in candidates:
                assert request.prefix_match is not None, "a waiting request has a match"
                node = self._cache.match(request.prefix_match)
                if _fits(self._cache, node, pages_of(request)):
                    lease = self._cache.attach(node)
                    self._queue.remove_admitted(request, len(request.tokens) - PAGE * node.depth)
                    return request, lease
        return None


class ArrivalQueue:
    """First come, first served. The cache does not know what waits."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._requests: deque[Request] = deque()
        self.tokens = 0
        """Engine tokens of all waiting requests, cached ones included: peers' routers do not ask for it."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self.tokens += len(request.tokens)

    def take(self, pages_of: PagesOf) -> tuple[Request, Lease] | None:
        request = self._requests[0]
        match = self._cache.track(0, request.tokens)
        try:
            node = self._cache.match(match)
            if not _fits(self._cache, node, pages_of(request)):
                return None
            lease = self._cache.attach(node)
        finally:
            self._cache.untrack(match)
        del self._requests[0]
        self.tokens -= len(request.tokens)
        return request, lease


def create_queue(engine: Engine, cache: PrefixCache, capacity: int) -> PodQueue:
    """Return the queue of an engine whose cache has `capacity` pages."""
    if engine == "fcfs":
        return ArrivalQueue(cache)
    return FairleadQueue(cache, capacity, ORDER if engine == "fairlead" else "fcfs")


def _fits(cache: PrefixCache, node: Node, pages: int) -> bool:
    """Whether a request with this cached prefix can get all its pages."""
    return pages - node.depth <= cache.available - cache.unused_above(node)
