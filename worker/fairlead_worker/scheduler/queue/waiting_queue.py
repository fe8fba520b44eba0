"""The waiting requests in the order of the policy, with a bound on how often one can be passed."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import assert_never

from fairlead_worker.cache.node import PrefixMatch
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.config import PolicyName, SchedulerConfig
from fairlead_worker.scheduler.queue.fair_queue import FairOrder
from fairlead_worker.scheduler.queue.policies import ArrivalOrder, HeapOrder, Order, QueueTokens, ShortestOrder, by_prefix, by_priority
from fairlead_worker.scheduler.request import Request


class WaitingQueue:
    """Requests without pages. Preempted ones come first, oldest first, and only more urgent ones (policy priority) pass them.

    Two requests that preempt each other in turns would not progress (TokenSpeed's rule). The other requests follow the policy
    (`policies.py`, `fair_queue.py`). The oldest of them can be passed `max_bypass` times, then it is next. So each request waits for a
    bounded number of others.
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self._tokens = QueueTokens()
        self._sizes: dict[PrefixMatch, int] = {}
        """Uncached tokens of each waiting request, as counted in `_tokens`."""
        self._unpromised: OrderedDict[Request, None] = OrderedDict()
        """Waiting requests whose blocks the index does not show yet."""
        self._cache = cache
        self._max_bypass = config.max_bypass
        self._scan_limit = config.admission_scan_limit
        self._refresh_limit = config.match_refresh_limit
        self._promise_limit = config.promise_limit
        self._promise_tokens = config.promise_tokens
        self._preempted: list[Request] = []
        self._requests: OrderedDict[PrefixMatch, Request] = OrderedDict()
        self._bypassed = 0
        self._orders_by_cache = config.policy in ("sjf", "lpm")
        self._priority = config.policy == "priority"
        self._order = self._create_order(config.policy)
        self.fair = self._order if isinstance(self._order, FairOrder) else None
        """The tenants' counters, if the policy is fair; else None."""

    @property
    def tokens(self) -> int:
        """Uncached tokens of all waiting requests. What the cache changed since the last `refresh` is not in it."""
        return self._tokens.waiting

    def __len__(self) -> int:
        return len(self._requests) + len(self._preempted)

    def add(self, request: Request) -> None:
        """Add a new request, or one preempted for priority. Its arrival decides its place among equals."""
        self._requests[self._track(request)] = request
        self._order.add(request)

    def add_preempted(self, request: Request) -> None:
        """Add a request that lost its pages to other decodes."""
        self._track(request)
        insort(self._preempted, request, key=self._rank)

    def remove(self, request: Request) -> None:
        """Remove an admitted or aborted request."""
        prefix_match = request.prefix_match
        assert prefix_match is not None, "a waiting request has a match"
        if prefix_match in self._requests:
            if prefix_match is next(iter(self._requests)):
                self._bypassed = 0
            del self._requests[prefix_match]
            self._order.remove(request)
        else:
            self._preempted.remove(request)
        self._cache.untrack(prefix_match)
        request.prefix_match = None
        self._unpromised.pop(request, None)
        size = self._sizes.pop(prefix_match)
        self._tokens.waiting -= size
        self._tokens.left += size

    def remove_admitted(self, request: Request) -> None:
        """Remove an admitted request, and count that it passed the oldest one."""
        if request.prefix_match in self._requests and request is not self._oldest():
            self._bypassed += 1
        self.remove(request)

    def refresh(self) -> None:
        """Update counts and order after cache changes, for a bounded number of requests."""
        for prefix_match in self._cache.refresh(self._refresh_limit):
            self._update(prefix_match)

    def promise(self) -> None:
        """Show the blocks that requests will compute to the index, for a bounded number of requests that still wait."""
        left, tokens = self._promise_limit, self._promise_tokens
        while self._unpromised and left and tokens > 0 and self._cache.may_promise:
            request, _ = self._unpromised.popitem(last=False)
            prefix_match = request.prefix_match
            assert prefix_match is not None, "a waiting request has a match"
            was_current = prefix_match.is_current
            request.promised = self._cache.promise(prefix_match)
            if not was_current:
                self._update(prefix_match)
            left -= 1
            tokens -= len(request.tokens)

    def candidates(self) -> Generator[Request, None, None]:
        """Yield requests to admit, best first. Requests that are not removed stay. Close the iterator (contextlib.closing)."""
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
        """Return the first request that may preempt less urgent ones (policy priority), or None."""
        if not self._priority or not self._requests or self._bypassed >= self._max_bypass:
            return None
        with closing(self._order.candidates()) as candidates:
            first = next(candidates)
        return None if self._preempted and self._preempted[0].priority <= first.priority else first

    def _in_order(self, before: int | None = None) -> Iterator[Request]:
        """Yield requests in policy order until the bypass limit. `before`: only requests more urgent than this priority."""
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

    def _create_order(self, policy: PolicyName) -> Order:
        match policy:
            case "sjf":
                return ShortestOrder(self._requests, self._cache, self._tokens)
            case "fcfs":
                return ArrivalOrder(self._requests)
            case "lpm":
                return HeapOrder(self._requests, self._cache, by_prefix)
            case "priority":
                return HeapOrder(self._requests, self._cache, by_priority)
            case "fair":
                return FairOrder()
        assert_never(policy)

    def _track(self, request: Request) -> PrefixMatch:
        request.prefix_match = self._cache.track(request.root, request.tokens, request.reusable, bool(request.adapter))
        self._count(request.prefix_match)
        if request.promised is None:
            self._unpromised[request] = None
        return request.prefix_match

    def _update(self, prefix_match: PrefixMatch) -> None:
        """Update count and order after a match was updated: the order drops an entry whose key has changed."""
        self._count(prefix_match)
        if self._orders_by_cache and prefix_match in self._requests:
            self._order.update(self._requests[prefix_match])

    def _count(self, prefix_match: PrefixMatch) -> None:
        """Count the uncached tokens of a waiting request."""
        size = len(prefix_match.tokens) - prefix_match.depth * self._cache.page_size
        self._tokens.waiting += size - self._sizes.get(prefix_match, 0)
        self._sizes[prefix_match] = size

    def _oldest(self) -> Request:
        return next(iter(self._requests.values()))

    def _rank(self, request: Request) -> tuple[int, int]:
        return (request.priority if self._priority else 0), request.arrival
