"""One router of a service is asked now and then what it sees of the index and of the workers' traffic: of one service, twice a minute,
and only while one is ready."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from fairlead_operator.observed import ObservedIndex, ObservedTraffic
from fairlead_operator.polling.periodic import PeriodicTask
from fairlead_operator.polling.prober import Prober, RouterUnavailable
from fairlead_operator.status import index as index_status
from fairlead_operator.status import traffic

PERIOD = 30.0  # seconds
FIRST_DELAY = 2.0  # seconds until a router is asked of which nothing is known
MAX_MISSES = 3  # answers that may fail to come before what was seen counts no more


class IndexPoller:
    """`seen` is the last answer, `traffic` what went through since the one before; `changed()` is called when either is another."""

    def __init__(self, prober: Prober, on_change: Callable[[], None]) -> None:
        self._prober, self._on_change = prober, on_change
        self.seen: ObservedIndex | None = None
        self.traffic: ObservedTraffic | None = None
        self._look: traffic.CounterSnapshot | None = None
        self._address = ""
        self._poll_soon = asyncio.Event()
        self._task = PeriodicTask(self._ask)
        self._pause, self._misses = 0.0, 0

    def follow(self, address: str, *, known: bool) -> None:
        """Ask the router at `address` from now on; none: stop. `known`: something was said before, so the first look may wait."""
        if not address:
            self.stop()
        else:
            if not self._address:
                self._pause = random.uniform(0, PERIOD if known else FIRST_DELAY)
            self._address = address
            self._task.start(f"index of {address}")

    def poll_soon(self) -> None:
        """Something has happened by which a router learns more of the index: look at once."""
        self._poll_soon.set()

    def stop(self) -> None:
        self._task.stop()
        self.seen, self.traffic, self._look = None, None, None
        self._address, self._misses = "", 0

    async def _ask(self) -> float:
        """The pause comes first: somebody may be in a hurry."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause):
                await self._poll_soon.wait()
        self._poll_soon.clear()
        self._pause = PERIOD * random.uniform(0.8, 1.2)
        before = self.seen, self.traffic
        try:
            self._take(await self._prober.page(self._address))
            self._misses = 0
        except (RouterUnavailable, KeyError, TypeError, AttributeError) as error:
            self._misses += 1
            if self._misses < MAX_MISSES:
                return 0.0
            self.seen = ObservedIndex("Unknown", str(error))
        if (self.seen, self.traffic) != before:
            self._on_change()
        return 0.0

    def _take(self, page: Mapping[str, Any]) -> None:
        look = traffic.CounterSnapshot.of(page, time.monotonic())
        self.seen = index_status.parse_router_page(page)
        went = traffic.measure_traffic(self._look, look) if self._look is not None and look is not None else None
        if self._look is None or look is None or went is not None:
            self._look, self.traffic = look, went
