"""Who is admitted next: the waiting requests, in the order of the policy."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Generator, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.cache.watch import Watch
from fairlead_worker.engine.config import SchedulerConfig
from fairlead_worker.engine.request import Request


def _arrival(request: Request) -> int:
    return request.arrival


class WaitingQueue:
    """Requests without pages. Retracted ones come first, oldest first, and nobody passes them: two that take turns in evicting each
    other would get nowhere (TokenSpeed's rule).

    The others come in arrival order (fcfs) or by the longest cached prefix (lpm), ties by arrival. The oldest of them can be passed
    `max_bypass` times, by longer prefixes or because it does not fit yet; then it is next. So each one waits for a bounded number of
    others.

    lpm keeps a heap keyed by matched pages. Entries of requests that have gone, or match something else by now, are dropped as they
    come up; a request whose match changed gets a new entry. Nothing is ever sorted.
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self.tokens = 0
        """Known tokens of all that wait."""
        self._cache = cache
        self._lpm = config.policy == "lpm"
        self._max_bypass = config.max_bypass
        self._lookahead = config.lookahead
        self._refresh = config.refresh
        self._retracted: list[Request] = []
        self._requests: OrderedDict[Watch, Request] = OrderedDict()
        self._heap: list[tuple[int, int, Watch]] = []
        self._bypassed = 0

    def __len__(self) -> int:
        return len(self._requests) + len(self._retracted)

    def add(self, request: Request) -> None:
        watch = self._watch(request)
        self._requests[watch] = request
        if self._lpm:
            self._push(watch, request)

    def add_retracted(self, request: Request) -> None:
        self._watch(request)
        insort(self._retracted, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """It was admitted or aborted."""
        watch = request.watch
        assert watch is not None, "a request that waits is watched"
        if watch in self._requests:
            if watch is next(iter(self._requests)):
                self._bypassed = 0
            del self._requests[watch]
        else:
            self._retracted.remove(request)
        self._cache.unwatch(watch)
        request.watch = None
        self.tokens -= len(request.tokens)

    def admitted(self, request: Request) -> None:
        """Takes it out, and counts whom it has passed."""
        if request.watch in self._requests and request is not self._oldest():
            self._bypassed += 1
        self.remove(request)

    def must_go(self, request: Request) -> bool:
        """True when it has been passed as often as may be: it waits for nobody now."""
        return self._bypassed >= self._max_bypass and request is self._oldest()

    def refresh(self) -> None:
        """Brings the order up to date with what the cache has gained and lost, a bounded number of requests at a time."""
        if self._lpm:
            for watch in self._cache.refresh(self._refresh):
                if watch in self._requests:
                    self._push(watch, self._requests[watch])

    def candidates(self) -> Generator[Request, None, None]:
        """Requests to admit, best first; those not taken out stay. Close the iterator when done (contextlib.closing)."""
        for request in self._retracted[:]:
            yield request
            if request.watch is not None:
                return
        while self._requests and self._bypassed >= self._max_bypass:
            request = self._oldest()
            yield request
            if request.watch is not None:
                return
        yield from self._longest_prefixes() if self._lpm else self._in_order()

    def _in_order(self) -> Iterator[Request]:
        left = 0
        while left < self._lookahead:
            some = list(islice(self._requests.values(), left, left + 32))
            if not some:
                return
            for request in some:
                yield request
                left += request.watch is not None
                if left == self._lookahead or self._bypassed >= self._max_bypass:
                    return

    def _longest_prefixes(self) -> Iterator[Request]:
        heap = self._heap
        seen: dict[Watch, tuple[int, int, Watch]] = {}
        try:
            while heap and len(seen) < self._lookahead and self._bypassed < self._max_bypass:
                entry = heappop(heap)
                watch = entry[2]
                request = self._requests.get(watch)
                if request is None or watch.depth != -entry[0] or watch in seen:
                    continue
                self._cache.match(watch)
                if watch.depth != -entry[0]:  # was unsettled: its turn may be later, or was earlier
                    self._push(watch, request)
                    continue
                seen[watch] = entry
                yield request
                if request.watch is None:
                    del seen[watch]
        finally:
            for watch, entry in seen.items():
                if watch in self._requests:
                    heappush(heap, entry)

    def _watch(self, request: Request) -> Watch:
        request.watch = self._cache.watch(request.root, request.tokens)
        self.tokens += len(request.tokens)
        return request.watch

    def _oldest(self) -> Request:
        return next(iter(self._requests.values()))

    def _push(self, watch: Watch, request: Request) -> None:
        heappush(self._heap, (-watch.depth, request.arrival, watch))
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap[:] = [(-watch.depth, request.arrival, watch) for watch, request in self._requests.items()]
            heapify(self._heap)
