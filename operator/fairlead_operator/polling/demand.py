"""Follows what is asked of one service with `spec.scaling.target`: a question to each of its routers, which is answered when there is
something to answer, and every few seconds while there is. Wakes the service's loop only when another size would be decided.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fairlead_operator.observed import Need
from fairlead_operator.polling.demand_client import RouterDeaf
from fairlead_operator.polling.periodic import Repeated
from fairlead_operator.polling.prober import Prober
from fairlead_operator.scaling.decision import decided, recent
from fairlead_operator.scaling.demand import Demand, Report
from fairlead_operator.scaling.needs import WINDOW, need
from fairlead_operator.scaling.standing import Standing

LOOK = 5.0  # seconds between two questions to a router that has requests
WAIT = 60.0  # seconds that an idle router may take to answer
RETRY_LONGEST = 10.0  # seconds until a router that did not answer is asked again


@dataclass(eq=False)
class _Router:
    """One that is asked."""

    asking: Repeated
    report: Report | None = None  # its last answer; None: it did not answer
    wait: float = 0.0  # seconds that it may take for the next one
    failures: int = 0  # in a row


class DemandWatch:
    """`needs`: what was needed lately, oldest first. `changed()`: `decided` now says something else than the size that is."""

    def __init__(self, prober: Prober, changed: Callable[[], None]) -> None:
        self._prober, self._changed = prober, changed
        self._standing: Standing | None = None
        self._routers: dict[str, _Router] = {}
        self._needs: list[Need] = []

    @property
    def needs(self) -> tuple[Need, ...]:
        return tuple(self._needs)

    def follow(self, addresses: Sequence[str], standing: Standing | None) -> None:
        """Ask these routers from now on. None: nobody decides here, stop."""
        if standing is None:
            self.stop()
            return
        self._standing = standing
        for gone in self._routers.keys() - set(addresses):
            self._routers.pop(gone).asking.stop()
        for address in addresses:
            if address not in self._routers:
                self._routers[address] = router = _Router(Repeated(partial(self._ask, address)))
                router.asking.start(f"demand at {address}")

    def stop(self) -> None:
        for router in self._routers.values():
            router.asking.stop()
        self._standing, self._routers, self._needs = None, {}, []

    async def _ask(self, address: str) -> float:
        router, standing = self._routers[address], self._standing
        asked, wait = time.monotonic(), router.wait
        try:
            router.report = await self._prober.demand.ask(address, wait, standing.hint(time.time()) if standing is not None else {})
        except RouterDeaf:
            router.report, router.wait = None, 0.0
            router.failures += 1
            self._take()
            return min(RETRY_LONGEST, 2.0 ** min(router.failures, 5)) * random.uniform(0.5, 1.0)
        router.failures = 0
        self._take()
        waited = time.monotonic() - asked >= wait / 2
        router.wait = self._patience(router.report) if router.report.idle else 0.0
        return 0.0 if router.report.idle and waited else LOOK * random.uniform(0.8, 1.0)

    def _patience(self, report: Report) -> float:
        """Seconds that an idle router may wait: until it is worth looking again even if nothing happens."""
        standing = self._standing
        if standing is None or standing.fleet.wanted == 0:
            return WAIT * random.uniform(0.8, 1.0)
        allowed, idle = standing.scaling.idle_seconds, standing.fleet.idle(report.idle_seconds, time.time())
        if allowed is not None and idle < allowed:
            return min(WAIT, max(0.2, allowed - idle + 0.1))
        return WINDOW if standing.fleet.wanted > max(1, standing.scaling.min_replicas) else WAIT * random.uniform(0.8, 1.0)

    def _take(self) -> None:
        standing = self._standing
        if standing is None or standing.scaling.target is None or not any(router.report for router in self._routers.values()):
            return
        demand = Demand.of(router.report for router in self._routers.values())
        self._needs.append(need(demand, standing.fleet, standing.scaling.target.seconds, time.time()))
        self._needs[:] = recent(self._needs, max(WINDOW, standing.scaling.stable_seconds))
        if decided(standing.scaling, standing.fleet.wanted, self._needs).reason:
            self._changed()
