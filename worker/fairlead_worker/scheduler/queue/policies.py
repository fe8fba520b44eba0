"""Orders of admission among requests of equal priority: by arrival, and longest cached prefix. `WaitingQueue` owns the requests."""

from collections import OrderedDict
from collections.abc import Callable, Generator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import assert_never

from fairlead_common.scheduling_policy import PolicyName
from fairlead_worker.cache.node import PrefixMatch
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.request import Request
from fairlead_worker.scheduler.tenant_shares import HasShare

Waiting = OrderedDict[PrefixMatch, Request]
Key = Callable[[Request, PrefixMatch], float]
Entry = tuple[int, float, int, int, PrefixMatch, str]
"""Priority, key, arrival, a serial number that makes entries distinct, and the match and the tenant of the request."""


def create_key(policy: PolicyName) -> Key:
    """Return the key of a policy: the lowest is first, and among equals the earliest arrival. It must not change with time."""
    match policy:
        case "fcfs":
            return lambda request, prefix_match: 0
        case "lpm":
            return lambda request, prefix_match: -prefix_match.depth
    assert_never(policy)


class HeapOrder:
    """Lowest priority number first, then lowest key, then arrival.

    A heap with lazy entries: an entry is dropped when it comes up if its request no longer waits or has another key. A request whose key
    changes gets a new entry from `update`, so a key must not change with time. Nothing is ever sorted.

    An entry whose tenant has no share left is moved to a heap of this tenant. Its first entry comes back in each step, and the next one
    when that is admitted or dropped. So a step costs the same, however many requests of such a tenant wait.
    """

    def __init__(self, waiting: Waiting, cache: PrefixCache, has_share: HasShare, key: Key) -> None:
        self._waiting = waiting
        self._cache = cache
        self._has_share = has_share
        self._key = key
        self._heap: list[Entry] = []
        self._held: dict[str, list[Entry]] = {}
        """By tenant."""
        self._entries = count()

    def add(self, request: Request) -> None:
        """Add a request that starts to wait."""
        prefix_match = request.prefix_match
        assert prefix_match is not None, "a waiting request has a match"
        heap = self._heap
        heappush(heap, self._entry(request, prefix_match))
        if len(heap) + sum(map(len, self._held.values())) > 2 * len(self._waiting) + 64:
            heap[:] = [self._entry(request, prefix_match) for prefix_match, request in self._waiting.items()]
            heapify(heap)
            self._held.clear()

    update = add
    """Note that another prefix of the request is cached now."""

    def _entry(self, request: Request, prefix_match: PrefixMatch) -> Entry:
        key, submit = self._key(request, prefix_match), request.submit
        return submit.priority, key, request.arrival, next(self._entries), prefix_match, submit.tenant

    def _release(self, tenant: str) -> None:
        """Return the first held entry of a tenant to the heap."""
        held = self._held.get(tenant)
        if held:
            heappush(self._heap, heappop(held))
        else:
            self._held.pop(tenant, None)

    def candidates(self) -> Generator[Request, None, None]:
        """Yield each waiting request whose tenant has a share left at most once, best first.

        The caller may admit a request before it resumes the generator, and may close it early. A request that still has a `prefix_match`
        at that time was not admitted and is a candidate of the next call.
        """
        heap, key = self._heap, self._key
        for tenant in list(self._held):
            self._release(tenant)
        seen: dict[PrefixMatch, Entry] = {}
        try:
            while heap:
                entry = heappop(heap)
                *_, prefix_match, tenant = entry
                request = self._waiting.get(prefix_match)
                if request is None or key(request, prefix_match) != entry[1] or prefix_match in seen:
                    self._release(tenant)
                    continue
                self._cache.match(prefix_match)
                if key(request, prefix_match) != entry[1]:  # the match was stale, so the entry has the wrong place
                    self.add(request)
                    self._release(tenant)
                    continue
                if not self._has_share(request):
                    heappush(self._held.setdefault(tenant, []), entry)
                    continue
                seen[prefix_match] = entry
                yield request
                if request.prefix_match is None:
                    del seen[prefix_match]
                self._release(tenant)
        finally:
            for prefix_match, entry in seen.items():
                if prefix_match in self._waiting:
                    heappush(heap, entry)
