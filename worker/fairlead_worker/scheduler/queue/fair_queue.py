"""Fair queueing between tenants: the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024)."""

from collections import OrderedDict
from collections.abc import Generator
from heapq import heapify, heappop, heappush

from fairlead_worker.scheduler.request import Request

_PROMPT_TOKEN = 1
_OUTPUT_TOKEN = 2
"""Cost of a prompt and an output token: the paper's weights. Cached tokens cost nothing."""
_MAX_IDLE_COUNTERS = 4096
"""Maximum number of kept counters of tenants without waiting requests."""


class FairOrder:
    """Admits the tenant with the least service first; within a tenant, by arrival.

    A tenant's counter rises with each computed prompt token and each output token (charged per block). A tenant that returns after a
    pause is lifted to the lowest counter of the waiting tenants, so idling earns no credit. A counter at or below that value has no
    effect and may be dropped, so memory stays bounded for any number of tenants.
    """

    def __init__(self) -> None:
        self._queues: dict[str, OrderedDict[Request, None]] = {}
        self._counters: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []
        """A lower bound of each waiting tenant's counter: counters only rise."""
        self._last = 0
        """Counter of the tenant whose queue became empty last."""

    def counter(self, tenant: str) -> int:
        """Return the service that `tenant` has received."""
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
        """Charge the uncached prompt of an admitted request. Call it once: recomputing after a preemption is not charged."""
        self._charge(request.tenant, _PROMPT_TOKEN * (request.prompt_length - request.history.cached))

    def charge_output(self, request: Request) -> None:
        """Charge the output tokens since the last call."""
        if request.output_length > request.history.charged:
            self._charge(request.tenant, _OUTPUT_TOKEN * (request.output_length - request.history.charged))
            request.history.charged = request.output_length

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
        """Return the waiting tenant with the least service. Tenants in `set_aside` have no heap entry."""
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
        """Drop the lowest counters of tenants without waiting requests. The highest ones still delay their tenants."""
        absent = sorted((counter, tenant) for tenant, counter in self._counters.items() if tenant not in self._queues)
        for _, tenant in absent[:-_MAX_IDLE_COUNTERS]:
            del self._counters[tenant]
