"""Who is admitted next: the waiting requests, in the order of the policy, and nobody passed for ever."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import closing

from fairlead_worker.cache.node import PrefixMatch
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.fair_queue import FairOrder
from fairlead_worker.scheduler.policies import ArrivalOrder, HeapOrder, Order, by_prefix, by_priority
from fairlead_worker.scheduler.request import Request


class WaitingQueue:
    """Requests without pages. Retracted ones come first, oldest first, and nobody passes them but the more urgent (policy priority): two
    that take turns in evicting each other would get nowhere (TokenSpeed's rule).

    The others come as the policy says (`orders.py`, `fair.py`). The oldest of them can be passed `max_bypass` times, by better ones
    or because it does not fit yet; then it is next. So each one waits for a bounded number of others.
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self.tokens = 0
        """Known tokens of all that wait."""
        self._cache = cache
        self._page_size = cache.page_size
        self._max_bypass = config.max_bypass
        self._scan_limit = config.admission_scan_limit
        self._refresh_limit = config.match_refresh_limit
        self._preempted: list[Request] = []
        self._requests: OrderedDict[PrefixMatch, Request] = OrderedDict()
        self._bypassed = 0
        self._lpm = config.policy == "lpm"
        self._priority = config.policy == "priority"
        self.fair = FairOrder() if config.policy == "fair" else None
        """The tenants' counters, where the policy is fair."""
        self._order: Order
        if self.fair is not None:
            self._order = self.fair
        elif config.policy == "fcfs":
            self._order = ArrivalOrder(self._requests)
        else:
            self._order = HeapOrder(self._requests, cache, by_prefix if self._lpm else by_priority)

    def __len__(self) -> int:
        return len(self._requests) + len(self._preempted)

    @property
    def has_urgent(self) -> bool:
        """Whether somebody waits who is to wait for nobody: one that was retracted, or, where there are priorities, anyone."""
        return bool(self._preempted) or self._priority

    def count_uncached_tokens(self) -> int:
        """Known tokens of all that wait which the cache does not have, as of when each came or was looked at last. Looks at each one."""
        retracted = [request.prefix_match.depth for request in self._preempted if request.prefix_match is not None]
        return self.tokens - sum([*[prefix_match.depth for prefix_match in self._requests], *retracted]) * self._page_size

    def add(self, request: Request) -> None:
        """It has come, or was preempted: among its equals it is where its arrival puts it, but nobody's turn is put off by it."""
        self._requests[self._track(request)] = request
        self._order.add(request)

    def add_preempted(self, request: Request) -> None:
        self._track(request)
        insort(self._preempted, request, key=self._rank)

    def remove(self, request: Request) -> None:
        """It was admitted or aborted."""
        prefix_match = request.prefix_match
        assert prefix_match is not None, "a request that waits is watched"
        if prefix_match in self._requests:
            if prefix_match is next(iter(self._requests)):
                self._bypassed = 0
            del self._requests[prefix_match]
            self._order.remove(request)
        else:
            self._preempted.remove(request)
        self._cache.untrack(prefix_match)
        request.prefix_match = None
        self.tokens -= len(request.tokens)

    def remove_admitted(self, request: Request) -> None:
        """Takes it out, and counts whom it has passed."""
        if request.prefix_match in self._requests and request is not self._oldest():
            self._bypassed += 1
        self.remove(request)

    def refresh(self) -> None:
        """Brings the order up to date with what the cache has gained and lost, a bounded number of requests at a time."""
        if self._lpm:
            for prefix_match in self._cache.refresh(self._refresh_limit):
                if prefix_match in self._requests:
                    self._order.update(self._requests[prefix_match])

    def candidates(self) -> Generator[Request, None, None]:
        """Requests to admit, best first; those not taken out stay. Close the iterator when done (contextlib.closing)."""
        for request in self._preempted[:]:
            if self._priority:
                yield from self._in_order(request.priority)
            yield request
            if request.prefix_match is not None:
                return
        while self._requests and self._bypassed >= self._max_bypass:
            request = self._oldest()
            yield request
            if request.prefix_match is not None:
                return
        yield from self._in_order()

    def most_urgent(self) -> Request | None:
        """With policy priority: the first that running requests of less priority may have to make room for."""
        if not self._priority or not self._requests or self._bypassed >= self._max_bypass:
            return None
        with closing(self._order.candidates()) as candidates:
            first = next(candidates)
        return None if self._preempted and self._preempted[0].priority <= first.priority else first

    def _in_order(self, before: int | None = None) -> Iterator[Request]:
        """As the policy has them, while there is one to pass; only those more urgent than priority `before`."""
        if self._bypassed >= self._max_bypass:
            return
        skipped = 0
        with closing(self._order.candidates()) as candidates:
            for request in candidates:
                if before is not None and request.priority >= before:
                    return
                yield request
                skipped += request.prefix_match is not None
                if skipped >= self._scan_limit or self._bypassed >= self._max_bypass:
                    return

    def _track(self, request: Request) -> PrefixMatch:
        request.prefix_match = self._cache.track(request.root, request.tokens, request.reusable, bool(request.adapter))
        self.tokens += len(request.tokens)
        return request.prefix_match

    def _oldest(self) -> Request:
        return next(iter(self._requests.values()))

    def _rank(self, request: Request) -> tuple[int, int]:
        return (request.priority if self._priority else 0), request.arrival
