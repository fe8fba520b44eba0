"""The uncached tokens that wait, by priority and tenant, and the clocks of the order of `policies.ShortestOrder`."""

from dataclasses import dataclass, field

from fairlead_worker.cache.node import PrefixMatch
from fairlead_worker.scheduler.request import Request


@dataclass(slots=True)
class TenantBacklog:
    """The waiting requests of one tenant in one class."""

    tokens: int = 0
    """Uncached tokens, those of requests preempted for memory included."""
    requests: int = 0
    ordered: int = 0
    """Those of `requests` that follow the policy. The others were preempted for memory and go first."""


@dataclass(slots=True)
class ClassBacklog:
    """The waiting requests of one priority. It exists while there are any."""

    clock: float = 0.0
    """Uncached tokens admitted in this class, each divided by the tenants that waited: the virtual time of weighted fair queueing."""
    tenants: dict[str, TenantBacklog] = field(default_factory=dict)


class Backlog:
    """Counts the uncached tokens of all waiting requests."""

    def __init__(self) -> None:
        self.tokens = 0
        self.classes: dict[int, ClassBacklog] = {}
        """By priority."""
        self._sizes: dict[PrefixMatch, int] = {}

    def add(self, request: Request, prefix_match: PrefixMatch, size: int) -> None:
        """Count a request that starts to wait. `size`: its uncached tokens."""
        waiting = self.classes.get(request.priority)
        if waiting is None:
            waiting = self.classes[request.priority] = ClassBacklog()
        tenant = waiting.tenants.get(request.tenant)
        if tenant is None:
            tenant = waiting.tenants[request.tenant] = TenantBacklog()
        tenant.tokens += size
        tenant.requests += 1
        self.tokens += size
        self._sizes[prefix_match] = size

    def resize(self, request: Request, prefix_match: PrefixMatch, size: int) -> None:
        """Count that the cache holds more or less of a waiting request now."""
        change = size - self._sizes[prefix_match]
        self.of(request).tokens += change
        self.tokens += change
        self._sizes[prefix_match] = size

    def advance_clock(self, request: Request, prefix_match: PrefixMatch) -> None:
        """Advance the clock of its class by a request that is admitted.

        An aborted one does not: else a tenant could age its other requests by sending and aborting prompts.
        """
        waiting = self.classes[request.priority]
        waiting.clock += self._sizes[prefix_match] / len(waiting.tenants)

    def remove(self, request: Request, prefix_match: PrefixMatch) -> None:
        """Forget a request that was admitted or aborted."""
        size = self._sizes.pop(prefix_match)
        waiting, tenant = self.classes[request.priority], self.of(request)
        tenant.tokens -= size
        tenant.requests -= 1
        self.tokens -= size
        if not tenant.requests:
            del waiting.tenants[request.tenant]
            if not waiting.tenants:
                del self.classes[request.priority]

    def of(self, request: Request) -> TenantBacklog:
        """Return the backlog that a waiting request belongs to."""
        return self.classes[request.priority].tenants[request.tenant]

    def size_of(self, prefix_match: PrefixMatch) -> int:
        """Return the uncached tokens of a waiting request."""
        return self._sizes[prefix_match]
