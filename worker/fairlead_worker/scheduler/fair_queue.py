"""Fair queueing between tenants: the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024)."""

from collections import OrderedDict
from collections.abc import Generator
from heapq import heapify, heappop, heappush

from fairlead_worker.scheduler.request import Request

_PROMPT_TOKEN = 1
_OUTPUT_TOKEN = 2
"""What tokens are charged at: the paper's weights. Cached tokens cost nothing."""
_MAX_IDLE_COUNTERS = 4096
"""Counters of absent tenants that are kept at most."""


class FairOrder:
    """The tenant that has been served least goes first; within a tenant, by arrival.

    A tenant's counter rises with each prompt token computed and each token put out for it (a block at a time). One that comes back
    after a silence is lifted to the least counter of those that wait: idling saves nothing up. A counter at or below that is as good
    as none and may be forgotten, so that tenants without number take no memory.
    """

    def __init__(self) -> None:
        self._queues: dict[str, OrderedDict[Request, None]] = {}
        self._counters: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []
        """A lower bound for each tenant that waits: counters only rise."""
        self._last = 0
        """Counter of the tenant whose queue was the last to run empty."""

    def counter(self, tenant: str) -> int:
        """What `tenant` has had."""
        return self._counters.get(tenant, 0)

    def add(self, request: Request) -> None:
        queue = self._queues.get(request.tenant)
        if queue is None:
            counter = self._counters[request.tenant] = max(self.counter(request.tenant), self._lowest_waiting())
            queue = self._queues[request.tenant] = OrderedDict()
            heappush(self._heap, (counter, request.tenant))
            if len(self._heap) > 2 * len(self._queues) + 64:  # tenants that left and came back have several entries
                self._heap[:] = [(self.counter(tenant), tenant) for tenant in self._queues]
                heapify(self._heap)
            if len(self._counters) > 2 * _MAX_IDLE_COUNTERS + len(self._queues):
                self._drop_idle_counters()
        queue[request] = None

    def update(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None:
        queue = self._queues.get(request.tenant)
        if queue is not None and request in queue:
            del queue[request]
            if not queue:
                self._last = self.counter(request.tenant)
                del self._queues[request.tenant]

    def charge_prompt(self, request: Request) -> None:
        """Its prompt is computed now, as far as it was not cached. Once: what a retraction costs is nobody's fault."""
        self._charge(request.tenant, _PROMPT_TOKEN * (request.prompt_length - request.cached))

    def charge_output(self, request: Request) -> None:
        """Charges what it has put out since the last call."""
        if request.output_length > request.charged:
            self._charge(request.tenant, _OUTPUT_TOKEN * (request.output_length - request.charged))
            request.charged = request.output_length

    def candidates(self) -> Generator[Request, None, None]:
        set_aside: set[str] = set()
        try:
            while (tenant := self._next(set_aside)) is not None:
                request = next(iter(self._queues[tenant]))
                yield request
                if request.prefix_match is not None:
                    set_aside.add(tenant)
        finally:
            for tenant in set_aside:
                if tenant in self._queues:
                    heappush(self._heap, (self.counter(tenant), tenant))

    def _next(self, set_aside: set[str]) -> str | None:
        """The tenant that has had least among those that wait. Its entry is out of the heap while it is in `set_aside`."""
        heap = self._heap
        while heap:
            counter, tenant = heap[0]
            if tenant not in self._queues or tenant in set_aside:
                heappop(heap)
            elif counter != self.counter(tenant):
                heappop(heap)
                heappush(heap, (self.counter(tenant), tenant))
            else:
                return tenant
        return None

    def _lowest_waiting(self) -> int:
        tenant = self._next(set())
        return self._last if tenant is None else self.counter(tenant)

    def _charge(self, tenant: str, tokens: int) -> None:
        self._counters[tenant] = self.counter(tenant) + tokens

    def _drop_idle_counters(self) -> None:
        """Keeps the highest of those that do not wait: they are the ones that a counter still holds back."""
        absent = sorted((counter, tenant) for tenant, counter in self._counters.items() if tenant not in self._queues)
        for _, tenant in absent[:-_MAX_IDLE_COUNTERS]:
            del self._counters[tenant]
