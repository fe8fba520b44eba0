"""Who gives way to whom: what a request lacks of memory, and which running requests lose theirs. Decides, and changes nothing."""

from collections.abc import Sequence

from fairlead_worker.cache.node import Node
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.budget import OutputReserve
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.request import Request, lease_of


class AdmissionControl:
    """The scheduler's view of its memory. It reads what runs and what grows; both are the scheduler's own."""

    def __init__(
        self, config: SchedulerConfig, cache: PrefixCache, reserve: OutputReserve, running: Sequence[Request], growing: Sequence[Request]
    ) -> None:
        """`running`: by arrival. `growing`: those of them whose next token needs a page."""
        self._cache = cache
        self._reserve = reserve
        self._running = running
        self._growing = growing
        self._page_size = cache.page_size
        self._max_running = config.max_num_seqs
        self._by_priority = config.policy == "priority"
        self._max_preemptions = config.max_preemptions

    def missing_pages(self, request: Request, node: Node, released: int = 0) -> int:
        """Pages that are missing for its whole prompt, cached down to `node`, and for the output to be expected of it and of all that run;
        0 or less: it fits.

        `released`: output of running requests that need not be kept for.

        Alone it is admitted on its prompt: `submit` has made sure that the pool holds all of it.
        """
        pages = -(-len(request.tokens) // self._page_size) - node.depth
        if self._running:
            pages += self._reserve.pages_to_keep(self._reserve.estimate(request) - released, self._page_size) + len(self._growing)
        return pages + self._cache.unused_above(node) - self._cache.available

    def pick_memory_victim(self) -> Request | None:
        """Who must go so that the others' decodes can go on; None: nobody. The oldest stays: alone, it always fits."""
        if len(self._growing) <= self._cache.available or len(self._running) <= 1:
            return None
        return min(self._running[1:], key=self._recompute_cost)

    def pick_priority_victims(self, urgent: Request) -> list[Request]:
        """Running requests of less priority whose going lets the waiting `urgent` one run; none where it fits, or where all of them would
        not be enough.

        Each request gives way `max_preemptions` times at most, and only to strictly more urgent ones, so everybody comes to an end.
        """
        victims = [r for r in self._running if r.priority > urgent.priority and r.priority_preemptions < self._max_preemptions]
        if not victims:
            return []
        assert urgent.prefix_match is not None, "it waits"
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
        if count < needed_slots or (missing_pages > 0 and count < len(self._running)):  # alone, it fits: `submit` has seen to that
            return []
        return victims[:count]

    def _recompute_cost(self, request: Request) -> tuple[int, int, int]:
        """Tokens to compute again if its own pages are lost; the latest arrival among equals. With policy priority, the least urgent."""
        lease = lease_of(request)
        shared = (len(lease.pages) - self._cache.exclusive_pages(lease)) * self._page_size
        return -request.priority if self._by_priority else 0, max(request.computed - shared, 0), -request.arrival
