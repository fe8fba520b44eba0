"""Follows the demand on one service with `spec.scaling.target`, by a long poll to each of its routers.

A router answers when it has requests, and is polled every few seconds while it has. The service's reconciler is woken only when the
autoscaler would decide another size.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fairlead_operator.observed import Recommendation
from fairlead_operator.polling.demand_client import DemandUnavailable
from fairlead_operator.polling.periodic import PeriodicTask
from fairlead_operator.polling.prober import Prober
from fairlead_operator.scaling.decision import decide, history_seconds, recent_recommendations
from fairlead_operator.scaling.demand import Demand, RouterReport
from fairlead_operator.scaling.recommendation import WINDOW, recommend
from fairlead_operator.scaling.state import ScalingState

BUSY_PERIOD = 5.0  # seconds between two polls of a router that has requests
MAX_WAIT = 60.0  # seconds that a long poll of an idle router may take
RETRY_LONGEST = 10.0  # seconds until an unavailable router is polled again


@dataclass(eq=False)
class _Router:
    """One polled router."""

    task: PeriodicTask
    report: RouterReport | None = None  # its last answer; None: it did not answer
    wait: float = 0.0  # seconds that the next long poll may take
    failures: int = 0  # in a row


class DemandPoller:
    """`recommendations`: the recent ones, oldest first. Calls `on_change()` when `decide` returns another size than the present one."""

    def __init__(self, prober: Prober, on_change: Callable[[], None]) -> None:
        self._prober, self._on_change = prober, on_change
        self._state: ScalingState | None = None
        self._routers: dict[str, _Router] = {}
        self._recommendations: list[Recommendation] = []

    @property
    def recommendations(self) -> tuple[Recommendation, ...]:
        return tuple(self._recommendations)

    def follow(self, addresses: Sequence[str], state: ScalingState | None) -> None:
        """Poll these routers from now on. No state: the operator does not scale this service, so stop."""
        if state is None:
            self.stop()
            return
        self._state = state
        for gone in self._routers.keys() - set(addresses):
            self._routers.pop(gone).task.stop()
        for address in addresses:
            if address not in self._routers:
                self._routers[address] = router = _Router(PeriodicTask(partial(self._poll, address)))
                router.task.start(f"demand at {address}")

    def stop(self) -> None:
        for router in self._routers.values():
            router.task.stop()
        self._state, self._routers, self._recommendations = None, {}, []

    async def _poll(self, address: str) -> float:
        router, state = self._routers[address], self._state
        started, wait = time.monotonic(), router.wait
        try:
            router.report = await self._prober.demand.fetch(address, wait, state.hint(time.time()) if state is not None else {})
        except DemandUnavailable:
            router.report, router.wait = None, 0.0
            router.failures += 1
            self._recommend()
            return min(RETRY_LONGEST, 2.0 ** min(router.failures, 5)) * random.uniform(0.5, 1.0)
        router.failures = 0
        self._recommend()
        waited = time.monotonic() - started >= wait / 2
        router.wait = self._choose_wait(router.report) if router.report.idle else 0.0
        return 0.0 if router.report.idle and waited else BUSY_PERIOD * random.uniform(0.8, 1.0)

    def _choose_wait(self, report: RouterReport) -> float:
        """Return the seconds for an idle router's long poll: until the size may change even without a request."""
        state = self._state
        if state is None or state.pool.desired == 0:
            return MAX_WAIT * random.uniform(0.8, 1.0)
        allowed, idle = state.scaling.idle_seconds, state.pool.idle(report.idle_seconds, time.time())
        if allowed is not None and idle < allowed:
            return min(MAX_WAIT, max(0.2, allowed - idle + 0.1))
        return WINDOW if state.pool.desired > max(1, state.scaling.min_replicas) else MAX_WAIT * random.uniform(0.8, 1.0)

    def _recommend(self) -> None:
        state = self._state
        if state is None or state.scaling.target is None or not any(router.report for router in self._routers.values()):
            return
        demand = Demand.of(router.report for router in self._routers.values())
        self._recommendations.append(recommend(demand, state.pool, state.scaling.target.seconds, time.time(), self._recommendations))
        self._recommendations[:] = recent_recommendations(self._recommendations, history_seconds(state.scaling, state.pool))
        if decide(state.scaling, state.pool.desired, self._recommendations).reason:
            self._on_change()
