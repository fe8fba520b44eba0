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
    """Order of admission. Each new request is added; removed requests are skipped when they come up."""

    def add(self, request: Request) -> None: ...

    def update(self, request: Request) -> None:
        """Another prefix of it is cached now."""
        ...

    def remove(self, request: Request) -> None:
        """It waits no more: admitted or aborted."""
        ...

    def candidates(self) -> Generator[Request, None, None]:
        """Best first. Whoever is still there when the next is asked for (`track` is set) stays; it comes up once at most."""
        ...


class ArrivalOrder:
    """First come, first served."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def add(self, request: Request) -> None: ...

    def update(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None: ...

    def candidates(self) -> Generator[Request, None, None]:
        skipped = 0
        while batch := list(islice(self._waiting.values(), skipped, skipped + 32)):
            for request in batch:
                yield request
                skipped += request.prefix_match is not None


class HeapOrder:
    """By a number, ties by arrival: matched pages (lpm) or priority.

    A heap with lazy entries: those of requests that have gone, or have another number by now, are dropped as they come up; a request
    whose number has changed gets a new entry. Nothing is ever sorted.
    """

    def __init__(self, waiting: Waiting, cache: PrefixCache, key: Callable[[Request, PrefixMatch], int]) -> None:
        self._waiting = waiting
        self._cache = cache
        self._key = key
        self._heap: list[Entry] = []
        self._entries = count()

    def add(self, request: Request) -> None:
        prefix_match = request.prefix_match
        assert prefix_match is not None, "a request that waits is watched"
        heap = self._heap
        heappush(heap, self._entry(request, prefix_match))
        if len(heap) > 2 * len(self._waiting) + 64:
            heap[:] = [self._entry(request, prefix_match) for prefix_match, request in self._waiting.items()]
            heapify(heap)

    def _entry(self, request: Request, prefix_match: PrefixMatch) -> Entry:
        return self._key(request, prefix_match), request.arrival, next(self._entries), prefix_match

    update = add

    def remove(self, request: Request) -> None: ...

    def candidates(self) -> Generator[Request, None, None]:
        heap, key = self._heap, self._key
        seen: dict[PrefixMatch, Entry] = {}
        try:
            while heap:
                entry = heappop(heap)
                prefix_match = entry[3]
                request = self._waiting.get(prefix_match)
                if request is None or key(request, prefix_match) != entry[0] or prefix_match in seen:
                    continue
                self._cache.match(prefix_match)
                if key(request, prefix_match) != entry[0]:  # was unsettled: its turn may be later, or was earlier
                    self.add(request)
                    continue
                seen[prefix_match] = entry
                yield request
                if request.prefix_match is None:
                    del seen[prefix_match]
        finally:
            for prefix_match, entry in seen.items():
                if prefix_match in self._waiting:
                    heappush(heap, entry)


def by_prefix(request: Request, prefix_match: PrefixMatch) -> int:
    return -prefix_match.depth


def by_priority(request: Request, prefix_match: PrefixMatch) -> int:
    return request.priority
