"""Admission checks and victim selection. Apart from the tenants' shares it decides only: the scheduler changes the state."""

from collections import Counter
from collections.abc import Collection, Sequence

from fairlead_worker.cache.grouped import GroupedPrefixCache
from fairlead_worker.cache.node import Node
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.scheduler.budget import OutputReserve
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.request import Request, lease_of
from fairlead_worker.scheduler.tenant_shares import TenantShares


def is_ahead(request: Request) -> bool:
    """Whether a partly prefilled request has computed more than before its last preemption. Its pages stay cached, so it loses nothing."""
    return request.computed > request.history.lost


class AdmissionControl:
    """Checks memory for admissions and preemptions. It reads lists that the scheduler owns."""

    def __init__(
        self, config: SchedulerConfig, cache: PrefixCache, reserve: OutputReserve, running: Sequence[Request], growing: Collection[Request]
    ) -> None:
        """`running`: by arrival. `growing`: decodes whose token needs a page."""
        self._cache = cache
        self._groups = cache if isinstance(cache, GroupedPrefixCache) else None
        self._reserve = reserve
        self._running = running
        self._growing = growing
        self._page_size = cache.page_size
        self._max_running = config.max_num_seqs
        self._max_preemptions = config.max_preemptions
        self._places, self._pages = TenantShares(), TenantShares()

    def has_share(self, request: Request) -> bool:
        """Return whether a request's tenant may have more places and pages. Requests without a tenant always may."""
        if not request.submit.tenant:
            return True
        if not self._places.allow(request, self._max_running - len(self._running)):
            return False
        return self._is_first(request) or self._pages.allow(request, self._cache.available - self._kept_pages())

    def start(self, request: Request, node: Node) -> None:
        """Count what an admitted request takes of its tenant's shares. Call it before its pages are leased."""
        output = int(self._reserve.estimate(request) * self._reserve.ratio)
        request.expected_pages = self._prompt_pages(request, node) + output // self._page_size
        self._places.add(request, 1)
        self._pages.add(request, request.expected_pages)

    def end(self, request: Request) -> None:
        """Give back what a request took of its tenant's shares."""
        self._places.add(request, -1)
        self._pages.add(request, -request.expected_pages)

    def missing_pages(self, request: Request, node: Node, released: int = 0, full_reserve: bool = False) -> int:
        """Return how many pages are missing to admit `request`; 0 or less: it fits.

        It needs pages for its whole prompt, cached down to `node`, and for the expected output of itself and of all running requests.
        `released`: output tokens of running requests that need no reserve, because they are preempted for it.

        Unless `full_reserve`, the first request of a tenant leaves pages for the output of one request of each other tenant, and of all
        that are more urgent. If more are needed, `pick_memory_victim` takes them from a tenant with several. If nothing runs, only its
        prompt counts: `submit` checked that the pool holds the whole request.
        """
        kept = output = 0
        if self._running:
            output = self._reserve.estimate(request) - released
            if not full_reserve and self._is_first(request):
                output -= self._reserve.tokens * self._places.beyond_first(request) // len(self._running)
            kept = self._kept_pages(output)
        if self._groups is not None:
            return kept + self._groups.shortage(len(request.tokens), max(int(output * self._reserve.ratio), 0), node)
        return kept + self._prompt_pages(request, node) + self._cache.unused_above(node) - self._cache.available

    def _prompt_pages(self, request: Request, node: Node) -> int:
        if self._groups is not None:
            return self._groups.cost(len(request.tokens), node)
        return -(-len(request.tokens) // self._page_size) - node.depth

    def _kept_pages(self, extra: int = 0) -> int:
        """Return the pages that the running requests are expected to need, and one more with `extra` output tokens."""
        pages = self._reserve.pages_to_keep(extra, self._page_size)
        if self._groups is not None:
            ratio, size = self._reserve.ratio, self._page_size
            reached = ((lease_of(each), -(-(each.length + int(each.reserved * ratio)) // size)) for each in self._running)
            pages = self._groups.pages_to_keep(pages, reached)
        return pages + len(self._growing)

    def _is_first(self, request: Request) -> bool:
        """Whether nothing of a request's tenant runs. A request is the first one once: what was preempted waits for all pages."""
        return bool(request.submit.tenant) and not request.history.preemptions and self._places.has_none(request)

    def pick_memory_victim(self) -> Request | None:
        """Return the request to preempt so that the other decodes fit, or None. The oldest request stays: alone, it always fits.

        Among equally urgent ones, it is one of the tenant that has the most pages beside those of its largest request.
        """
        if len(self._growing) <= self._cache.available or len(self._running) <= 1:
            return None
        held, largest = Counter[str](), Counter[str]()
        for request in self._running:
            pages, tenant = len(lease_of(request).pages), request.submit.tenant
            held[tenant] += pages
            largest[tenant] = max(largest[tenant], pages)

        def key(request: Request) -> tuple[int, int, int, int]:
            urgency, tokens, arrival = self._recompute_cost(request)
            tenant = request.submit.tenant
            return urgency, largest[tenant] - held[tenant], tokens, arrival

        return min(self._running[1:], key=key)

    def pick_priority_victims(self, urgent: Request, chunked: Request | None) -> list[Request]:
        """Return the less urgent running requests to preempt so that the waiting `urgent` one is computed next.

        These are the partly prefilled request, because only one can be, and those whose pages or places are needed. The list is empty if
        preempting all of them would not be enough. Only strictly more urgent requests preempt, and each request loses computed tokens
        `max_preemptions` times at most, so every request finishes.
        """
        victims = [r for r in self._running if r.submit.priority > urgent.submit.priority and self._may_preempt(r, chunked)]
        if not victims:
            return []
        first = [chunked] if chunked is not None and chunked in victims else []
        assert urgent.prefix_match is not None, "a waiting request has a match"
        needed_slots = len(self._running) - self._max_running + 1
        node = self._cache.match(urgent.prefix_match)
        if needed_slots <= 0 and self.missing_pages(urgent, node) <= 0:
            return first
        missing_pages = self.missing_pages(urgent, node, full_reserve=True)
        victims.sort(key=self._recompute_cost)
        count = pages = output = 0
        while count < len(victims) and (count < needed_slots or missing_pages > 0):
            pages += self._cache.exclusive_pages(lease_of(victims[count]), node)
            output += victims[count].reserved
            count += 1
            missing_pages = self.missing_pages(urgent, node, output, full_reserve=True) - pages
        if count < needed_slots or (missing_pages > 0 and count < len(self._running)):  # `submit` checked that it fits alone
            return []
        return victims[:count] + [request for request in first if request not in victims[:count]]

    def _may_preempt(self, request: Request, chunked: Request | None) -> bool:
        return request.history.priority_preemptions < self._max_preemptions or (request is chunked and is_ahead(request))

    def _recompute_cost(self, request: Request) -> tuple[int, int, int]:
        """Return the sort key of victims: (least urgent first, tokens to recompute, latest arrival first)."""
        lease = lease_of(request)
        shared = (len(lease.pages) - self._cache.exclusive_pages(lease)) * self._page_size
        return -request.submit.priority, max(request.computed - shared, 0), -request.arrival
