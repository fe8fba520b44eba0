"""The waiting requests in the order of the policy, with a bound on how often one can be passed."""

from collections import Counter, OrderedDict
from collections.abc import Generator
from contextlib import closing
from heapq import heappop, heappush
from math import inf

from fairlead_worker.cache.node import PrefixMatch
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.queue.policies import HeapOrder, create_key
from fairlead_worker.scheduler.request import Request
from fairlead_worker.scheduler.tenant_shares import HasShare


class WaitingQueue:
    """Requests without pages: the most urgent first, among equals those that lost their pages to decodes, then by policy (`policies.py`).

    Two requests that take each other's pages in turns would not progress (TokenSpeed's rule). So no equally or less urgent request passes
    one that lost its pages, except those of other tenants.

    The oldest request can be passed `max_bypass` times, then it is next under every policy. So each request waits for a bounded number of
    others. More urgent requests count by tokens: less urgent work gets one token in `max_bypass` under any load, and takes no more.
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache, has_share: HasShare = lambda request: True) -> None:
        """`has_share`: requests for which it is False are no candidates."""
        self._has_share = has_share
        self._cache = cache
        self._max_bypass = config.max_bypass
        self._chunk = max(config.chunked_prefill_size, cache.page_size) if config.chunked_prefill_size > 0 else config.max_model_len
        self._scan_limit = config.admission_scan_limit
        self._refresh_limit = config.match_refresh_limit
        self._promise_limit = config.promise_limit
        self._promise_tokens = config.promise_tokens
        self._requests: OrderedDict[PrefixMatch, Request] = OrderedDict()
        self._sizes: dict[PrefixMatch, int] = {}
        """Uncached tokens of each request."""
        self._priorities = Counter[int]()
        self._by_arrival: dict[int, Request] = {}
        self._arrivals: list[int] = []
        """A heap of the keys of `_by_arrival`. Those of requests that left are dropped when they come up."""
        self._unpromised: OrderedDict[Request, None] = OrderedDict()
        """Waiting requests whose blocks the index does not show yet."""
        self._skipped = Counter[str]()
        """Candidates of each tenant that were not admitted in this step."""
        self._passed = 0.0
        """Tokens that passed the oldest request. It is due at `max_bypass` times those of its next chunk."""
        self._least_urgent = 0
        """Highest priority number of the requests that run, or a higher one."""
        self.tokens = 0
        """Uncached tokens of all waiting requests. What the cache changed since the last `refresh` is not in it."""
        self._policy_key = create_key(config.policy)
        self._order = HeapOrder(self._requests, cache, self._may_run, self._key)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, lost_pages: bool = False) -> None:
        """Add a new or preempted request. `lost_pages`: it was preempted because decodes ran out of pages."""
        request.history.lost_pages = lost_pages
        submit = request.submit
        prefix_match = self._cache.track(submit.root, request.tokens, request.reusable, bool(submit.adapter))
        request.prefix_match = prefix_match
        self._requests[prefix_match] = request
        size = self._sizes[prefix_match] = self._uncached(prefix_match)
        self.tokens += size
        self._priorities[submit.priority] += 1
        self._by_arrival[request.arrival] = request
        heappush(self._arrivals, request.arrival)
        self._order.add(request)
        if request.promised is None:
            self._unpromised[request] = None

    def remove(self, request: Request) -> None:
        """Remove an admitted or aborted request."""
        prefix_match = request.prefix_match
        assert prefix_match is not None, "a waiting request has a match"
        del self._requests[prefix_match], self._by_arrival[request.arrival]
        self.tokens -= self._sizes.pop(prefix_match)
        priority = request.submit.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        self._unpromised.pop(request, None)
        self._cache.untrack(prefix_match)
        request.prefix_match = None

    def remove_admitted(self, request: Request, count: int) -> None:
        """Remove an admitted request, of which this step computes `count` tokens, and count that it passed the oldest one."""
        oldest = self._oldest()
        turn = self._turn_of(oldest)
        if oldest is request:
            self._passed = max(0.0, min(self._passed, self._max_bypass * turn) - self._max_bypass * count)
        elif request.submit.priority >= oldest.submit.priority:
            self._passed += turn
        self._least_urgent = max(self._least_urgent, request.submit.priority)
        self.remove(request)
        if oldest is not request:
            self.record_prefill(request, count)

    def record_prefill(self, request: Request, count: int) -> None:
        """Count the tokens that a step computes of an admitted request, if it is more urgent than the oldest waiting one."""
        if self._requests and request.submit.priority < self._oldest().submit.priority:
            self._passed += count

    def _turn_of(self, request: Request) -> int:
        """Return the tokens of a waiting request's next turn: a chunk, or the rest of its prompt."""
        assert request.prefix_match is not None, "a waiting request has a match"
        return min(self._chunk, self._sizes[request.prefix_match])

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
        self._skipped.clear()
        while self.has_due:
            request = self._oldest()
            yield request
            if request.prefix_match is not None:
                return
        blocked, skipped = inf, 0
        with closing(self._order.candidates()) as candidates:
            for request in candidates:
                priority, tenant = request.submit.priority, request.submit.tenant
                if priority > blocked:  # less urgent requests must not take the pages that another one waits for
                    return
                yield request
                if request.prefix_match is not None:
                    blocked, skipped = priority, skipped + 1
                    self._skipped[tenant] += self._scan_limit if request.history.lost_pages else 1
                    if request.history.lost_pages and not tenant:
                        return
                if skipped >= self._scan_limit or self.has_due:
                    return

    @property
    def has_due(self) -> bool:
        """Whether the oldest request is next because others passed it `max_bypass` times, and its tenant has a share left."""
        if not self._passed or not self._requests:
            return False
        oldest = self._oldest()
        return self._passed >= self._max_bypass * self._turn_of(oldest) and self._has_share(oldest)

    def is_due(self, request: Request) -> bool:
        """Return whether a request is the one of `has_due`."""
        return self.has_due and request is self._oldest()

    def reset_running(self) -> None:
        """Note that nothing runs, so there is nothing to preempt."""
        self._least_urgent = min(self._priorities, default=0)

    def most_urgent(self) -> Request | None:
        """Return the first request if it may preempt less urgent ones that run, or None."""
        if not self._requests or min(self._priorities) >= self._least_urgent:  # the usual case: all requests have one priority
            return None
        with closing(self._order.candidates()) as candidates:
            return next(candidates, None)

    def _may_run(self, request: Request) -> bool:
        """Return whether a request may be a candidate. One tenant gets half of the scan, so another one's are reached behind its own."""
        tenant = request.submit.tenant
        return not tenant or (2 * self._skipped[tenant] < self._scan_limit and self._has_share(request))

    def _key(self, request: Request, prefix_match: PrefixMatch) -> float:
        return -inf if request.history.lost_pages else self._policy_key(request, prefix_match)

    def _update(self, prefix_match: PrefixMatch) -> None:
        """Update count and order after a match was updated."""
        size = self._uncached(prefix_match)
        self.tokens += size - self._sizes[prefix_match]
        self._sizes[prefix_match] = size
        self._order.update(self._requests[prefix_match])

    def _uncached(self, prefix_match: PrefixMatch) -> int:
        return len(prefix_match.tokens) - prefix_match.depth * self._cache.page_size

    def _oldest(self) -> Request:
        while self._arrivals[0] not in self._by_arrival:
            heappop(self._arrivals)
        return self._by_arrival[self._arrivals[0]]
