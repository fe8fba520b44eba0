"""Admission checks and victim selection. Decides only: the scheduler changes the state."""

from collections.abc import Sequence

from fairlead_worker.cache.node import Node
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.budget import OutputReserve
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import Row
from fairlead_worker.scheduler.request import Request, lease_of


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
        self._by_priority = config.policy == "priority"
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

    def pick_priority_victims(self, urgent: Request) -> list[Request]:
        """Return the less urgent running requests to preempt so that the waiting `urgent` one fits.

        The list is empty if it fits already, or if preempting all of them would not be enough. Each request is preempted for priority
        `max_preemptions` times at most, and only by strictly more urgent requests, so every request finishes.
        """
        victims = [r for r in self._running if r.priority > urgent.priority and r.history.priority_preemptions < self._max_preemptions]
        if not victims:
            return []
        assert urgent.prefix_match is not None, "a waiting request has a match"
        needed_slots = len(self._running) - self._max_running + 1
        node = self._cache.match(urgent.prefix_match)
        missing_pages = self.missing_pages(urgent, node)
        if needed_slots <= 0 and missing_pages <= 0:
            return []
        victims.sort(key=self._recompute_cost)
        count = pages = output = 0
        while count < len(victims) and (count < needed_slots or missing_pages > 0):
            pages += self._cache.exclusive_pages(lease_of(victims[count]))
            output += victims[count].reserved
            count += 1
            missing_pages = self.missing_pages(urgent, node, output) - pages
        if count < needed_slots or (missing_pages > 0 and count < len(self._running)):  # `submit` checked that it fits alone
            return []
        return victims[:count]

    def _recompute_cost(self, request: Request) -> tuple[int, int, int]:
        """Return the sort key of victims: (with policy priority: least urgent first, tokens to recompute, latest arrival first)."""
        lease = lease_of(request)
        shared = (len(lease.pages) - self._cache.exclusive_pages(lease)) * self._page_size
        return -request.priority if self._by_priority else 0, max(request.computed - shared, 0), -request.arrival
