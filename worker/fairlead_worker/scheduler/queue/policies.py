"""Orders of admission: by arrival, longest cached prefix, shortest job. `WaitingQueue` owns the requests."""

from collections import OrderedDict
from collections.abc import Callable, Generator
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import NamedTuple, Protocol

from fairlead_worker.cache.node import PrefixMatch
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.queue.backlog import Backlog
from fairlead_worker.scheduler.request import Request

Waiting = OrderedDict[PrefixMatch, Request]
Entry = tuple[int, float, int, int, PrefixMatch]
"""Priority, key, arrival, a serial number that makes entries distinct, and the match of the request."""


class Order(Protocol):
    """Order of admission. `WaitingQueue` calls it for all requests except those preempted for memory."""

    def add(self, request: Request) -> None:
        """Add a request that starts to wait."""
        ...

    def update(self, request: Request) -> None:
        """Note that another prefix of the request is cached now. Called only if the policy has `policy_uses_cache`."""
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
    """Lowest priority number first, then lowest key, then arrival. Without `by_priority`, all requests have the same priority.

    A heap with lazy entries: an entry is dropped when it comes up if its request no longer waits or has another key. A request whose key
    changes gets a new entry from `update`, so a key must not change with time. Nothing is ever sorted.
    """

    def __init__(
        self, waiting: Waiting, cache: PrefixCache, key: Callable[[Request, PrefixMatch], float], by_priority: bool = False
    ) -> None:
        self._waiting = waiting
        self._cache = cache
        self._key = key
        self._by_priority = by_priority
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
        priority = request.priority if self._by_priority else 0
        return priority, self._key(request, prefix_match), request.arrival, next(self._entries), prefix_match

    update = add

    def remove(self, request: Request) -> None: ...

    def candidates(self) -> Generator[Request, None, None]:
        heap, key = self._heap, self._key
        seen: dict[PrefixMatch, Entry] = {}
        try:
            while heap:
                entry = heappop(heap)
                prefix_match = entry[4]
                request = self._waiting.get(prefix_match)
                if request is None or key(request, prefix_match) != entry[1] or prefix_match in seen:
                    continue
                self._cache.match(prefix_match)
                if key(request, prefix_match) != entry[1]:  # the match was stale, so the entry has the wrong place
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


def by_prefix(request: Request, prefix_match: PrefixMatch) -> float:
    """Return the key of policy lpm: the most cached pages are first."""
    return -prefix_match.depth


class Place(NamedTuple):
    """What `ShortestOrder` knows of a request from its arrival on."""

    clock: float
    """The clock of its class."""
    requests: int
    """Waiting requests of its tenant in its class."""
    ahead: int
    """Their uncached tokens."""
    share: float
    """Share of the tenants that wait in its class without its own: `(m - 1) / m`."""
    slack: float
    """Latest start that meets its deadline, in tokens of the clock after its arrival; infinite without a deadline."""


class ShortestOrder:
    """Shortest job first with priority, fair shares and deadlines, and with a bound on how long a request is passed.

    The most urgent class (lowest `priority`) is next. In a class, the lowest number is next. Take a request of `w` uncached tokens that
    arrives when the class' clock shows `clock`, behind `n` requests of its tenant with `ahead` uncached tokens, while `m` tenants wait. Its
    number is the clock plus the lowest of three delays, in tokens that its tenant computes while each other tenant computes as many:

        min(n * w, ahead) + w * (m - 1) / m    the delay that it causes to its tenant, at most its turn by arrival there, and its share
                                               of the delay that it causes to the other tenants
        slack / m                              the latest start that meets its deadline

    A later request of its class passes it only with a lower number, so only if it arrives before the clock shows
    `clock + ahead + w * (m - 1) / m`. The clock counts an admitted token as `1 / m`, so at most `M * (ahead + w)` tokens of the class are
    computed before, where `M` is the most tenants that wait in this time. With one tenant these are the `ahead` tokens: its turn under
    first come, first served. The virtual time is that of weighted fair queueing (Demers, Keshav and Shenker, SIGCOMM 1989).
    """

    def __init__(self, waiting: Waiting, cache: PrefixCache, backlog: Backlog) -> None:
        self._page_size = cache.page_size
        self._backlog = backlog
        self._heap = HeapOrder(waiting, cache, self._turn, by_priority=True)
        self._places: dict[Request, Place] = {}

    def add(self, request: Request) -> None:
        assert request.prefix_match is not None, "a waiting request has a match"
        waiting, tenant = self._backlog.classes[request.priority], self._backlog.of(request)
        size, tenants = self._backlog.size_of(request.prefix_match), len(waiting.tenants)
        if request.history.preemptions:  # it had its turn
            self._places[request] = Place(waiting.clock, 0, 0, 0.0, 0.0)
        else:
            slack = max(0.0, request.slack - size) / tenants
            self._places[request] = Place(waiting.clock, tenant.ordered, tenant.tokens - size, (tenants - 1) / tenants, slack)
        tenant.ordered += 1
        self._heap.add(request)

    def update(self, request: Request) -> None:
        self._heap.update(request)

    def remove(self, request: Request) -> None:
        del self._places[request]
        self._backlog.of(request).ordered -= 1

    def candidates(self) -> Generator[Request, None, None]:
        return self._heap.candidates()

    def _turn(self, request: Request, prefix_match: PrefixMatch) -> float:
        clock, requests, ahead, share, slack = self._places[request]
        size = len(request.tokens) - prefix_match.depth * self._page_size
        delay = min(requests * size, ahead) + size * share
        return clock + (delay if delay < slack else slack)
