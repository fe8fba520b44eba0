"""Shares of the batch and its pages by tenant: dynamic thresholds (Choudhury and Hahne, IEEE/ACM Transactions on Networking, 1998)."""

from collections import Counter, defaultdict
from collections.abc import Callable

from fairlead_worker.scheduler.request import Request

HasShare = Callable[[Request], bool]
"""Returns whether the tenant of a request may have more of the batch and the pages now."""
ALPHA = 7
"""A tenant gets more only while it has less than this many times what is free. One tenant alone gets 7 of 8 parts, two get 7 of 15 each: so
some stays free, and the first request of another tenant need not wait until an answer ends."""


class TenantShares:
    """Counts what the running requests of each tenant hold of one resource, by priority."""

    def __init__(self) -> None:
        self._held: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def add(self, request: Request, amount: int) -> None:
        """Count what a request takes, or with a negative amount gives back."""
        tenant, priority = request.submit.tenant, request.submit.priority
        tenants = self._held[priority]
        tenants[tenant] += amount
        if not tenants[tenant]:
            del tenants[tenant]
            if not tenants:
                del self._held[priority]

    def beyond_first(self, request: Request) -> int:
        """Return what tenants hold beyond one each, in each priority that is at most as urgent as `request`."""
        held = [one for priority, one in self._held.items() if priority >= request.submit.priority]
        return sum(sum(one.values()) - len(one) for one in held)

    def has_none(self, request: Request) -> bool:
        """Return whether a request's tenant holds nothing."""
        return not any(request.submit.tenant in tenants for tenants in self._held.values())

    def allow(self, request: Request, free: int) -> bool:
        """Return whether a request's tenant may get more, as `free` is left. It may preempt less urgent requests."""
        own = 0
        for priority, tenants in self._held.items():
            if priority > request.submit.priority:
                free += tenants.total()
            else:
                own += tenants[request.submit.tenant]
        return own < ALPHA * free
