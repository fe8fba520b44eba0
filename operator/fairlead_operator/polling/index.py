"""One router of a service is asked now and then what it sees of the index and of the workers' traffic: of one service, twice a minute,
and only while one is ready."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from fairlead_operator.observed import IndexSeen, TrafficSeen
from fairlead_operator.polling.periodic import Repeated
from fairlead_operator.polling.prober import Prober, RouterSilent
from fairlead_operator.status import index as index_status
from fairlead_operator.status import traffic

PERIOD = 30.0  # seconds
SOON = 2.0  # seconds until a router is asked of which nothing is known
MISSES = 3  # answers that may fail to come before what was seen counts no more


class IndexWatch:
    """`seen` is the last answer, `traffic` what went through since the one before; `changed()` is called when either is another."""

    def __init__(self, prober: Prober, changed: Callable[[], None]) -> None:
        self._prober, self._changed = prober, changed
        self.seen: IndexSeen | None = None
        self.traffic: TrafficSeen | None = None
        self._look: traffic.Look | None = None
        self._address = ""
        self._hurry = asyncio.Event()
        self._asking = Repeated(self._ask)
        self._pause, self._misses = 0.0, 0

    def follow(self, address: str, *, known: bool) -> None:
        """Ask the router at `address` from now on; none: stop. `known`: something was said before, so the first look may wait."""
        if not address:
            self.stop()
        else:
            if not self._address:
                self._pause = random.uniform(0, PERIOD if known else SOON)
            self._address = address
            self._asking.start(f"index of {address}")

    def hurry(self) -> None:
        """Something has happened by which a router learns more of the index: look at once."""
        self._hurry.set()

    def stop(self) -> None:
        self._asking.stop()
        self.seen, self.traffic, self._look = None, None, None
        self._address, self._misses = "", 0

    async def _ask(self) -> float:
        """The pause comes first: somebody may be in a hurry."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause):
                await self._hurry.wait()
        self._hurry.clear()
        self._pause = PERIOD * random.uniform(0.8, 1.2)
        before = self.seen, self.traffic
        try:
            self._take(await self._prober.page(self._address))
            self._misses = 0
        except (RouterSilent, KeyError, TypeError, AttributeError) as error:
            self._misses += 1
            if self._misses < MISSES:
                return 0.0
            self.seen = IndexSeen("Unknown", str(error))
        if (self.seen, self.traffic) != before:
            self._changed()
        return 0.0

    def _take(self, page: Mapping[str, Any]) -> None:
        look = traffic.Look.of(page, time.monotonic())
        self.seen = index_status.seen_by(page)
        went = traffic.between(self._look, look) if self._look is not None and look is not None else None
        if self._look is None or look is None or went is not None:
            self._look, self.traffic = look, went
