"""Polls one ready router of a service for its view of the index, the workers' traffic and their fallbacks, twice a minute."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from fairlead_operator.observed import ObservedIndex, ObservedTraffic
from fairlead_operator.polling.periodic import PeriodicTask
from fairlead_operator.polling.prober import Prober, RouterUnavailable
from fairlead_operator.status import fallback, traffic
from fairlead_operator.status import index as index_status

PERIOD = 30.0  # seconds
FIRST_DELAY = 2.0  # seconds until a router without a known state is polled
MAX_MISSES = 3  # missed answers after which the last one no longer counts


class IndexPoller:
    """`seen` is the last answer, `traffic` what was served since the one before, `fallbacks` the reasons of workers, by pod.

    Calls `on_change()` when one of them changes.
    """

    def __init__(self, prober: Prober, on_change: Callable[[], None]) -> None:
        self._prober, self._on_change = prober, on_change
        self.seen: ObservedIndex | None = None
        self.traffic: ObservedTraffic | None = None
        self.fallbacks: Mapping[str, str] | None = None
        self._snapshot: traffic.CounterSnapshot | None = None
        self._address = ""
        self._poll_soon = asyncio.Event()
        self._task = PeriodicTask(self._poll)
        self._pause, self._misses = 0.0, 0

    def follow(self, address: str, *, known: bool) -> None:
        """Poll the router at `address` from now on; empty: stop. `known`: the status has a state already, so the first poll may wait."""
        if not address:
            self.stop()
        else:
            if not self._address:
                self._pause = random.uniform(0, PERIOD if known else FIRST_DELAY)
            self._address = address
            self._task.start(f"index of {address}")

    def poll_soon(self) -> None:
        """Poll now: an event has given the router news of the index."""
        self._poll_soon.set()

    def stop(self) -> None:
        self._task.stop()
        self.seen, self.traffic, self.fallbacks, self._snapshot = None, None, None, None
        self._address, self._misses = "", 0

    async def _poll(self) -> float:
        """Pause first, unless `poll_soon` was called, and then poll."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause):
                await self._poll_soon.wait()
        self._poll_soon.clear()
        self._pause = PERIOD * random.uniform(0.8, 1.2)
        before = self.seen, self.traffic, self.fallbacks
        try:
            self._record(await self._prober.fetch_workers(self._address))
            self._misses = 0
        except (RouterUnavailable, KeyError, TypeError, AttributeError) as error:
            self._misses += 1
            if self._misses < MAX_MISSES:
                return 0.0
            self.seen = ObservedIndex("Unknown", str(error))
        if (self.seen, self.traffic, self.fallbacks) != before:
            self._on_change()
        return 0.0

    def _record(self, page: Mapping[str, Any]) -> None:
        snapshot = traffic.CounterSnapshot.parse(page, time.monotonic())
        self.seen, self.fallbacks = index_status.parse_router_page(page), fallback.parse_router_page(page)
        measured = traffic.measure_traffic(self._snapshot, snapshot) if self._snapshot is not None and snapshot is not None else None
        if self._snapshot is None or snapshot is None or measured is not None:
            self._snapshot, self.traffic = snapshot, measured
