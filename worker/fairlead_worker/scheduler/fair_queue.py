"""Fair queueing between tenants: the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024)."""

from collections import OrderedDict
from collections.abc import Generator
from heapq import heapify, heappop, heappush

from fairlead_worker.scheduler.request import Request

_PROMPT_TOKEN = 1
_OUTPUT_TOKEN = 2
"""What tokens are charged at: the paper's weights. Cached tokens cost nothing."""
_KEPT = 4096
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
            counter = self._counters[request.tenant] = max(self.counter(request.tenant), self._least())
            queue = self._queues[request.tenant] = OrderedDict()
            heappush(self._heap, (counter, request.tenant))
            if len(self._heap) > 2 * len(self._queues) + 64:  # tenants that left and came back have several entries
                self._heap[:] = [(self.counter(tenant), tenant) for tenant in self._queues]
                heapify(self._heap)
            if len(self._counters) > 2 * _KEPT + len(self._queues):
                self._forget()
        queue[request] = None

    def changed(self, request: Request) -> None: ...

    def gone(self, request: Request) -> None:
        queue = self._queues.get(request.tenant)
        if queue is not None and request in queue:
            del queue[request]
            if not queue:
                self._last = self.counter(request.tenant)
                del self._queues[request.tenant]

    def admitted(self, request: Request) -> None:
        """Its prompt is computed now, as far as it was not cached. Once: what a retraction costs is nobody's fault."""
        self._charge(request.tenant, _PROMPT_TOKEN * (request.prompt_length - request.cached))

    def wrote(self, request: Request) -> None:
        """Charges what it has put out since the last call."""
        if request.output_length > request.charged:
            self._charge(request.tenant, _OUTPUT_TOKEN * (request.output_length - request.charged))
            request.charged = request.output_length

    def candidates(self) -> Generator[Request, None, None]:
        aside: set[str] = set()
        try:
            while (tenant := self._next(aside)) is not None:
                request = next(iter(self._queues[tenant]))
                yield request
                if request.watch is not None:
                    aside.add(tenant)
        finally:
            for tenant in aside:
                if tenant in self._queues:
                    heappush(self._heap, (self.counter(tenant), tenant))

    def _next(self, aside: set[str]) -> str | None:
        """The tenant that has had least among those that wait. Its entry is out of the heap while it is in `aside`."""
        heap = self._heap
        while heap:
            counter, tenant = heap[0]
            if tenant not in self._queues or tenant in aside:
                heappop(heap)
            elif counter != self.counter(tenant):
                heappop(heap)
                heappush(heap, (self.counter(tenant), tenant))
            else:
                return tenant
        return None

    def _least(self) -> int:
        tenant = self._next(set())
        return self._last if tenant is None else self.counter(tenant)

    def _charge(self, tenant: str, tokens: int) -> None:
        self._counters[tenant] = self.counter(tenant) + tokens

    def _forget(self) -> None:
        """Keeps the highest of those that do not wait: they are the ones that a counter still holds back."""
        absent = sorted((counter, tenant) for tenant, counter in self._counters.items() if tenant not in self._queues)
        for _, tenant in absent[:-_KEPT]:
            del self._counters[tenant]
