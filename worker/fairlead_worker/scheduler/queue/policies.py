"""Orders of admission: by arrival, longest cached prefix, priority, shortest job. `WaitingQueue` owns the requests."""

from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Protocol

from fairlead_worker.cache.node import PrefixMatch
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.request import Request

Waiting = OrderedDict[PrefixMatch, Request]
Entry = tuple[int, int, int, PrefixMatch]
"""Key, arrival, a serial number that makes entries distinct, and the match of the request."""


class Order(Protocol):
    """Order of admission. `WaitingQueue` calls it for all requests except those preempted for memory."""

    def add(self, request: Request) -> None:
        """Add a request that starts to wait."""
        ...

    def update(self, request: Request) -> None:
        """Note that another prefix of the request is cached now. Policy lpm only."""
        ...

    def remove(self, request: Request) -> None:
        """Note that the request was admitted or aborted. It must not be a candidate again."""
        ...

    def candidates(self) -> Generator[Request, None, None]:
        """Yield each waiting request at most once, best first.

        The caller may admit a request before it resumes the generator, and may close it early. A request that still has a `prefix_match`
        at that time was not admitted and must be a candidate of the next call.
        """
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
    """Lowest key first, ties by arrival. The key of lpm is the matched pages, negated, and the key of priority is the priority.

    A heap with lazy entries: an entry is dropped when it comes up if its request no longer waits or has another key. A request whose key
    changes gets a new entry from `update`, so a key must not change with time. Nothing is ever sorted.
    """

    def __init__(self, waiting: Waiting, cache: PrefixCache, key: Callable[[Request, PrefixMatch], int]) -> None:
        self._waiting = waiting
        self._cache = cache
        self._key = key
        self._heap: list[Entry] = []
        self._entries = count()

    def add(self, request: Request) -> None:
        prefix_match = request.prefix_match
        assert prefix_match is not None, "a waiting request has a match"
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
                if key(request, prefix_match) != entry[0]:  # the match was stale, so the entry has the wrong place
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


@dataclass(slots=True)
class QueueTokens:
    """Uncached tokens: `waiting` in the queue now, `left` of all requests that have left it. `left` is the clock of `ShortestOrder`."""

    waiting: int = 0
    left: int = 0


class ShortestOrder:
    """Shortest job first, with a bound: a request is passed only by requests that arrive before its turn under first come, first served.

    Take a request of `w` uncached tokens that arrives when the clock shows `left`, behind `n` requests with `ahead` uncached tokens. Its
    number is `left + min(n * w, ahead)`, and the lowest number is next. `n * w` is the delay that it causes to the others if it goes first.

    A later request passes it only with a lower number, so only if it arrives before the clock shows `left + ahead`. Therefore a request
    waits for `ahead` tokens and for what arrives while these are computed: at full load about twice as long as by arrival.
    """

    def __init__(self, waiting: Waiting, cache: PrefixCache, tokens: QueueTokens) -> None:
        self._waiting = waiting
        self._page_size = cache.page_size
        self._tokens = tokens
        self._heap = HeapOrder(waiting, cache, self._turn)
        self._places: dict[Request, tuple[int, int, int]] = {}
        """Clock, requests ahead and tokens ahead at each waiting request's arrival."""

    def add(self, request: Request) -> None:
        assert request.prefix_match is not None, "a waiting request has a match"
        ahead = self._tokens.waiting - self._uncached(request, request.prefix_match)
        self._places[request] = (self._tokens.left, len(self._waiting) - 1, ahead)
        self._heap.add(request)

    def update(self, request: Request) -> None:
        self._heap.update(request)

    def remove(self, request: Request) -> None:
        del self._places[request]

    def candidates(self) -> Generator[Request, None, None]:
        return self._heap.candidates()

    def _turn(self, request: Request, prefix_match: PrefixMatch) -> int:
        left, requests, ahead = self._places[request]
        return left + min(requests * self._uncached(request, prefix_match), ahead)

    def _uncached(self, request: Request, prefix_match: PrefixMatch) -> int:
        return len(request.tokens) - prefix_match.depth * self._page_size
