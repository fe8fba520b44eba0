"""Follows what is asked of one service with `spec.scaling.target`: a question to each of its routers, which is answered when there is
something to answer, and every few seconds while there is. Wakes the service's loop only when another size would be decided.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from fairlead_operator.reconcile.demand_client import RouterDeaf
from fairlead_operator.reconcile.prober import Prober
from fairlead_operator.scaling.decision import decided, recent
from fairlead_operator.scaling.demand import Demand, Report
from fairlead_operator.scaling.needs import WINDOW, Need, need
from fairlead_operator.scaling.standing import Standing

LOOK = 5.0  # seconds between two questions to a router that has requests
WAIT = 60.0  # seconds that an idle router may take to answer
RETRY_LONGEST = 10.0  # seconds until a router that did not answer is asked again


class DemandWatch:
    """`needs`: what was needed lately, oldest first. `changed()`: `decided` now says something else than the size that is."""

    def __init__(self, prober: Prober, changed: Callable[[], None]) -> None:
        self._prober, self._changed = prober, changed
        self._standing: Standing | None = None
        self._reports: dict[str, Report | None] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
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
        for gone in self._tasks.keys() - set(addresses):
            self._tasks.pop(gone).cancel()
            self._reports.pop(gone, None)
        for address in addresses:
            if address not in self._tasks:
                self._reports[address] = None
                self._tasks[address] = asyncio.create_task(self._run(address), name=f"demand at {address}")

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._standing = None
        self._reports, self._tasks, self._needs = {}, {}, []

    async def _run(self, address: str) -> None:
        wait, failures = 0.0, 0
        while self._standing is not None:
            now, asked = time.time(), time.monotonic()
            try:
                report = await self._prober.demand.ask(address, wait, self._standing.hint(now))
            except RouterDeaf:
                self._reports[address] = None
                failures += 1
                self._take()
                wait = 0.0
                await asyncio.sleep(min(RETRY_LONGEST, 2.0 ** min(failures, 5)) * random.uniform(0.5, 1.0))
                continue
            failures, self._reports[address] = 0, report
            self._take()
            waited = time.monotonic() - asked >= wait / 2
            wait = self._patience(report) if report.idle else 0.0
            if not report.idle or not waited:
                await asyncio.sleep(LOOK * random.uniform(0.8, 1.0))

    def _patience(self, report: Report) -> float:
        """Seconds that an idle router may wait: until it is worth looking again even if nothing happens."""
        standing = self._standing
        if standing is None or standing.fleet.wanted == 0:
            return WAIT * random.uniform(0.8, 1.0)
        idle = standing.scaling.idle_seconds
        if idle is not None and report.idle_seconds < idle:
            return min(WAIT, max(0.2, idle - report.idle_seconds + 0.1))
        return WINDOW if standing.fleet.wanted > max(1, standing.scaling.min) else WAIT * random.uniform(0.8, 1.0)

    def _take(self) -> None:
        standing = self._standing
        if standing is None or standing.scaling.target is None or not any(self._reports.values()):
            return
        demand = Demand.of(self._reports.values())
        self._needs.append(need(demand, standing.fleet, standing.scaling.target.seconds, time.time()))
        self._needs[:] = recent(self._needs, max(WINDOW, standing.scaling.stable_seconds))
        if decided(standing.scaling, standing.fleet.wanted, self._needs).reason:
            self._changed()
