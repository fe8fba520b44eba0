"""Orders of admission: by arrival, by longest cached prefix, by priority. Each looks at the requests of a `WaitingQueue`, and owns none."""

from collections import OrderedDict
from collections.abc import Callable, Generator
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Protocol

from fairlead_worker.cache.node import PrefixMatch
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.request import Request

Waiting = OrderedDict[PrefixMatch, Request]
Entry = tuple[int, int, int, PrefixMatch]
"""Number, arrival, a count that tells equal ones apart, and the request's watch."""


class Order(Protocol):
    """Who is next. Told of every request that comes; those that have gone are found out as they come up."""

    def add(self, request: Request) -> None: ...

    def changed(self, request: Request) -> None:
        """Another prefix of it is cached now."""
        ...

    def gone(self, request: Request) -> None:
        """It waits no more: admitted or aborted."""
        ...

    def candidates(self) -> Generator[Request, None, None]:
        """Best first. Whoever is still there when the next is asked for (`watch` is set) stays; it comes up once at most."""
        ...


class ArrivalOrder:
    """First come, first served."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def add(self, request: Request) -> None: ...

    def changed(self, request: Request) -> None: ...

    def gone(self, request: Request) -> None: ...

    def candidates(self) -> Generator[Request, None, None]:
        left = 0
        while some := list(islice(self._waiting.values(), left, left + 32)):
            for request in some:
                yield request
                left += request.watch is not None


class HeapOrder:
    """By a number, ties by arrival: matched pages (lpm) or priority.

    A heap with lazy entries: those of requests that have gone, or have another number by now, are dropped as they come up; a request
    whose number has changed gets a new entry. Nothing is ever sorted.
    """

    def __init__(self, waiting: Waiting, cache: PrefixCache, number: Callable[[Request, PrefixMatch], int]) -> None:
        self._waiting = waiting
        self._cache = cache
        self._number = number
        self._heap: list[Entry] = []
        self._entries = count()

    def add(self, request: Request) -> None:
        watch = request.watch
        assert watch is not None, "a request that waits is watched"
        heap = self._heap
        heappush(heap, self._entry(request, watch))
        if len(heap) > 2 * len(self._waiting) + 64:
            heap[:] = [self._entry(request, watch) for watch, request in self._waiting.items()]
            heapify(heap)

    def _entry(self, request: Request, watch: PrefixMatch) -> Entry:
        return self._number(request, watch), request.arrival, next(self._entries), watch

    changed = add

    def gone(self, request: Request) -> None: ...

    def candidates(self) -> Generator[Request, None, None]:
        heap, number = self._heap, self._number
        seen: dict[PrefixMatch, Entry] = {}
        try:
            while heap:
                entry = heappop(heap)
                watch = entry[3]
                request = self._waiting.get(watch)
                if request is None or number(request, watch) != entry[0] or watch in seen:
                    continue
                self._cache.match(watch)
                if number(request, watch) != entry[0]:  # was unsettled: its turn may be later, or was earlier
                    self.add(request)
                    continue
                seen[watch] = entry
                yield request
                if request.watch is None:
                    del seen[watch]
        finally:
            for watch, entry in seen.items():
                if watch in self._waiting:
                    heappush(heap, entry)


def by_prefix(request: Request, watch: PrefixMatch) -> int:
    return -watch.depth


def by_priority(request: Request, watch: PrefixMatch) -> int:
    return request.priority
