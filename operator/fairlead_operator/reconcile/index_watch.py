"""One router of a service is asked now and then what it sees of the index: of one service, twice a minute, and only while one is ready."""

import asyncio
import contextlib
import random
from collections.abc import Callable

from fairlead_operator.observed import IndexSeen
from fairlead_operator.reconcile.prober import Prober, RouterSilent

PERIOD = 30.0  # seconds
SOON = 2.0  # seconds until a router is asked of which nothing is known
MISSES = 3  # answers that may fail to come before what was seen counts no more


class IndexWatch:
    """`seen` is the last answer; `changed()` is called when another one came."""

    def __init__(self, prober: Prober, changed: Callable[[], None]) -> None:
        self._prober, self._changed = prober, changed
        self.seen: IndexSeen | None = None
        self._address = ""
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def follow(self, address: str, *, known: bool) -> None:
        """Ask the router at `address` from now on; none: stop. `known`: something was said before, so the first look may wait."""
        if not address:
            self.stop()
        elif self._task is None:
            self._task = asyncio.create_task(self._run(random.uniform(0, PERIOD if known else SOON)), name=f"index of {address}")
        self._address = address

    def hurry(self) -> None:
        """Something has happened by which a router learns more of the index: look at once."""
        self._hurry.set()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task, self.seen = None, None

    async def _run(self, pause: float) -> None:
        misses = 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._hurry.wait()
            self._hurry.clear()
            pause = PERIOD * random.uniform(0.8, 1.2)
            try:
                seen = await self._prober.index(self._address)
                misses = 0
            except RouterSilent as error:
                misses += 1
                if misses < MISSES:
                    continue
                seen = IndexSeen("Unknown", str(error))
            if seen != self.seen:
                self.seen = seen
                self._changed()
