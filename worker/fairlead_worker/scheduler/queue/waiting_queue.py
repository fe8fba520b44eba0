"""The waiting requests in the order of the policy, with a bound on how often one can be passed."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Generator
from contextlib import closing
from typing import assert_never

from fairlead_worker.cache.node import PrefixMatch
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.config import PolicyName, SchedulerConfig
from fairlead_worker.scheduler.queue.backlog import Backlog
from fairlead_worker.scheduler.queue.fair_queue import FairOrder
from fairlead_worker.scheduler.queue.policies import ArrivalOrder, HeapOrder, Order, ShortestOrder, by_prefix
from fairlead_worker.scheduler.request import Request


class WaitingQueue:
    """Requests without pages. Preempted ones come first, oldest first, and only more urgent ones (policy sjf) pass them.

    Two requests that preempt each other in turns would not progress (TokenSpeed's rule). The other requests follow the policy
    (`policies.py`, `fair_queue.py`). The oldest of them can be passed `max_bypass` times, then it is next. So each request waits for a
    bounded number of others. A more urgent request counts by the chunks that are computed for it, a shorter one by its share of the
    oldest's next chunk. After this chunk, more urgent work preempts the oldest. So less urgent work gets one turn in `max_bypass` under any
    load, and takes no more from more urgent work. The first preempted request is next after as many turns of more urgent ones.
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self._backlog = Backlog()
        self._unpromised: OrderedDict[Request, None] = OrderedDict()
        """Waiting requests whose blocks the index does not show yet."""
        self._cache = cache
        self._max_bypass = config.max_bypass
        self._chunk = max(config.chunked_prefill_size, cache.page_size) if config.chunked_prefill_size > 0 else config.max_model_len
        self._scan_limit = config.admission_scan_limit
        self._refresh_limit = config.match_refresh_limit
        self._promise_limit = config.promise_limit
        self._promise_tokens = config.promise_tokens
        self._preempted: list[Request] = []
        self._requests: OrderedDict[PrefixMatch, Request] = OrderedDict()
        self._bypassed = 0.0
        """Turns that passed the oldest request."""
        self._bypassed_preempted = 0.0
        """Turns that passed the first preempted request."""
        self._turn: tuple[Request, int, float] | None = None
        """The oldest request that was just admitted, the tokens of its turn, and the turns that had passed it."""
        self._least_urgent = 0
        """Highest priority number of the requests that run, or a higher one."""
        self._orders_by_cache = config.policy_uses_cache
        self._priority = config.policy_uses_priority
        self._order = self._create_order(config.policy)
        self.fair = self._order if isinstance(self._order, FairOrder) else None
        """The tenants' counters, if the policy is fair; else None."""

    @property
    def tokens(self) -> int:
        """Uncached tokens of all waiting requests. What the cache changed since the last `refresh` is not in it."""
        return self._backlog.tokens

    def __len__(self) -> int:
        return len(self._requests) + len(self._preempted)

    def add(self, request: Request) -> None:
        """Add a new request, or one preempted for priority. Its arrival decides its place among equals."""
        prefix_match = self._track(request)
        self._requests[prefix_match] = request
        if request.arrival < self._oldest().arrival:  # it was preempted: it is still the oldest
            self._requests.move_to_end(prefix_match, last=False)
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
                self._bypassed = 0.0
            del self._requests[prefix_match]
            self._order.remove(request)
        else:
            if request is self._preempted[0]:
                self._bypassed_preempted = 0.0
            self._preempted.remove(request)
        self._cache.untrack(prefix_match)
        request.prefix_match = None
        self._unpromised.pop(request, None)
        self._backlog.remove(request, prefix_match)

    def remove_admitted(self, request: Request) -> None:
        """Remove an admitted request, and count that it passed the oldest one."""
        assert request.prefix_match is not None, "a waiting request has a match"
        self._backlog.advance_clock(request, request.prefix_match)
        self._turn = None
        if request.prefix_match in self._requests:
            oldest = self._oldest()
            if oldest is request:
                self._turn = request, self._turn_of(request), self._bypassed
            elif not self._priority or request.priority >= oldest.priority:
                self._bypassed += 1  # of a more urgent one its chunks count: `record_prefill`
        self._least_urgent = max(self._least_urgent, request.priority)
        self.remove(request)

    def record_prefill(self, request: Request, count: int) -> None:
        """Count the tokens that a step computes of an admitted request: a turn of the oldest, or what passes a less urgent one."""
        turn, self._turn = self._turn, None
        if turn is not None and turn[0] is request:
            if self._priority:  # a smaller chunk than its turn is a part of the turn
                self._bypassed = max(0.0, turn[2] - self._max_bypass * count / turn[1])
            return
        if not self._priority:
            return
        if self._requests and request.priority < (oldest := self._oldest()).priority:
            self._bypassed += self._turns(count, oldest)
        if self._preempted and request.priority < self._preempted[0].priority:
            self._bypassed_preempted += self._turns(count, self._preempted[0])

    def _turns(self, count: int, passed: Request) -> float:
        """Return as how many turns `count` tokens count. Fewer than the next turn of the passed request count as their share of it."""
        return min(count / self._turn_of(passed), max(1.0, count / self._chunk))

    def _turn_of(self, request: Request) -> int:
        """Return the tokens of a waiting request's next turn: a chunk, or the rest of its prompt."""
        assert request.prefix_match is not None, "a waiting request has a match"
        return min(self._chunk, self._backlog.size_of(request.prefix_match))

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
            is_due = self._bypassed_preempted >= self._max_bypass
            if self._priority and not is_due and (yield from self._in_order(request.priority)):
                return
            yield request
            if request.prefix_match is not None:
                return
        while self._requests and self._bypassed >= self._max_bypass:
            request = self._oldest()
            yield request
            if request.prefix_match is not None:
                return
        yield from self._in_order()

    @property
    def has_due(self) -> bool:
        """Whether the oldest request is next because others passed it `max_bypass` times."""
        return self._bypassed >= self._max_bypass and bool(self._requests)

    def is_due(self, request: Request) -> bool:
        """Return whether a request is the one of `has_due`."""
        return self.has_due and request is self._oldest()

    def was_preempted_for_pages(self, request: Request) -> bool:
        """Return whether a request waits because it lost its pages to other decodes."""
        return request in self._preempted

    def reset_running(self) -> None:
        """Note that nothing runs, so there is nothing to preempt."""
        self._least_urgent = min(self._backlog.classes, default=0)

    def most_urgent(self) -> Request | None:
        """Return the first request if it may preempt less urgent ones that run (policy sjf), or None."""
        if not self._priority or not self._requests:
            return None
        if min(self._backlog.classes) >= self._least_urgent:  # the usual case: all requests have one priority
            return None
        with closing(self._order.candidates()) as candidates:
            first = next(candidates)
        return None if self._preempted and self._preempted[0].priority <= first.priority else first

    def _in_order(self, before: int | None = None) -> Generator[Request, None, bool]:
        """Yield requests in policy order until the bypass limit. `before`: only requests more urgent than this priority.

        Return whether one of them was not admitted.
        """
        skipped = 0
        if self._bypassed >= self._max_bypass:
            return False
        with closing(self._order.candidates()) as candidates:
            for request in candidates:
                if before is not None and request.priority >= before:
                    break
                yield request
                if request.prefix_match is not None:
                    skipped += 1
                    if self._priority:  # less urgent requests must not take the pages that it waits for
                        before = request.priority + 1
                if skipped >= self._scan_limit or self._bypassed >= self._max_bypass:
                    break
        return skipped > 0

    def _create_order(self, policy: PolicyName) -> Order:
        match policy:
            case "sjf":
                return ShortestOrder(self._requests, self._cache, self._backlog)
            case "fcfs":
                return ArrivalOrder(self._requests)
            case "lpm":
                return HeapOrder(self._requests, self._cache, by_prefix)
            case "fair":
                return FairOrder()
        assert_never(policy)

    def _track(self, request: Request) -> PrefixMatch:
        prefix_match = self._cache.track(request.root, request.tokens, request.reusable, bool(request.adapter))
        request.prefix_match = prefix_match
        self._backlog.add(request, prefix_match, self._uncached(prefix_match))
        if request.promised is None:
            self._unpromised[request] = None
        return prefix_match

    def _update(self, prefix_match: PrefixMatch) -> None:
        """Update count and order after a match was updated: the order drops an entry whose key has changed."""
        request = self._requests.get(prefix_match)
        if request is None:
            request = next(each for each in self._preempted if each.prefix_match is prefix_match)
            self._backlog.resize(request, prefix_match, self._uncached(prefix_match))
            return
        self._backlog.resize(request, prefix_match, self._uncached(prefix_match))
        if self._orders_by_cache:
            self._order.update(request)

    def _uncached(self, prefix_match: PrefixMatch) -> int:
        return len(prefix_match.tokens) - prefix_match.depth * self._cache.page_size

    def _oldest(self) -> Request:
        return next(iter(self._requests.values()))

    def _rank(self, request: Request) -> tuple[int, int]:
        return (request.priority if self._priority else 0), request.arrival
