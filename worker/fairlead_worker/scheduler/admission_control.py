"""Admission checks and victim selection. Decides only: the scheduler changes the state."""

from collections.abc import Sequence

from fairlead_worker.cache.node import Node
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.budget import OutputReserve
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import Row
from fairlead_worker.scheduler.request import Request, lease_of


def is_ahead(request: Request) -> bool:
    """Whether a partly prefilled request has computed more than before its last preemption. Its pages stay cached, so it loses nothing."""
    return request.computed > request.history.lost


class AdmissionControl:
    """Checks memory for admissions and preemptions. It reads lists that the scheduler owns."""

    def __init__(
        self, config: SchedulerConfig, cache: PrefixCache, reserve: OutputReserve, running: Sequence[Request], growing: Sequence[Row]
    ) -> None:
        """`running`: by arrival. `growing`: rows of decodes whose token needs a page."""
        self._cache = cache
        self._reserve = reserve
        self._running = running
        self._growing = growing
        self._page_size = cache.page_size
        self._max_running = config.max_num_seqs
        self._by_priority = config.policy_uses_priority
        self._max_preemptions = config.max_preemptions

    def missing_pages(self, request: Request, node: Node, released: int = 0) -> int:
        """Return how many pages are missing to admit `request`; 0 or less: it fits.

        It needs pages for its whole prompt, cached down to `node`, and for the expected output of itself and of all running requests.
        `released`: output tokens of running requests that need no reserve.

        If nothing runs, only its prompt counts: `submit` checked that the pool holds the whole request.
        """
        pages = -(-len(request.tokens) // self._page_size) - node.depth
        if self._running:
            pages += self._reserve.pages_to_keep(self._reserve.estimate(request) - released, self._page_size) + len(self._growing)
        return pages + self._cache.unused_above(node) - self._cache.available

    def pick_memory_victim(self) -> Request | None:
        """Return the request to preempt so that the other decodes fit, or None. The oldest request stays: alone, it always fits."""
        if len(self._growing) <= self._cache.available or len(self._running) <= 1:
            return None
        return min(self._running[1:], key=self._recompute_cost)

    def pick_priority_victims(self, urgent: Request, chunked: Request | None) -> list[Request]:
        """Return the less urgent running requests to preempt so that the waiting `urgent` one is computed next.

        These are the partly prefilled request, because only one can be, and those whose pages or places are needed. The list is empty if
        preempting all of them would not be enough. Only strictly more urgent requests preempt, and each request loses computed tokens
        `max_preemptions` times at most, so every request finishes.
        """
        victims = [r for r in self._running if r.priority > urgent.priority and self._may_preempt(r, chunked)]
        if not victims:
            return []
        first = [chunked] if chunked is not None and chunked in victims else []
        assert urgent.prefix_match is not None, "a waiting request has a match"
        needed_slots = len(self._running) - self._max_running + 1
        node = self._cache.match(urgent.prefix_match)
        missing_pages = self.missing_pages(urgent, node)
        if needed_slots <= 0 and missing_pages <= 0:
            return first
        victims.sort(key=self._recompute_cost)
        count = pages = output = 0
        while count < len(victims) and (count < needed_slots or missing_pages > 0):
            pages += self._cache.exclusive_pages(lease_of(victims[count]))
            output += victims[count].reserved
            count += 1
            missing_pages = self.missing_pages(urgent, node, output) - pages
        if count < needed_slots or (missing_pages > 0 and count < len(self._running)):  # `submit` checked that it fits alone
            return []
        return victims[:count] + [request for request in first if request not in victims[:count]]

    def _may_preempt(self, request: Request, chunked: Request | None) -> bool:
        return request.history.priority_preemptions < self._max_preemptions or (request is chunked and is_ahead(request))

    def _recompute_cost(self, request: Request) -> tuple[int, int, int]:
        """Return the sort key of victims: (with policy priority: least urgent first, tokens to recompute, latest arrival first)."""
        lease = lease_of(request)
        shared = (len(lease.pages) - self._cache.exclusive_pages(lease)) * self._page_size
        return -request.priority if self._by_priority else 0, max(request.computed - shared, 0), -request.arrival
