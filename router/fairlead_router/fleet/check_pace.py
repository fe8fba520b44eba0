"""When health checks start: spread evenly and at a bounded rate, so that no fleet is too large to be checked.

A check costs a tenth to a third of a millisecond. All of a large fleet's at once would stop the event loop, and their deadlines would pass
before their answers were read. The deadline of a check therefore counts from its turn.
"""

import asyncio
import random
from time import monotonic
from typing import Final

CHECKS_PER_SECOND: Final = 500
"""Health checks that start in a second: a sixth of a slow core."""
BURST: Final = 64
"""Checks that start at once after a pause: a small fleet's need no spreading."""


class CheckPace:
    """Turns for the checks of one router."""

    def __init__(self, interval: float) -> None:
        """`interval`: seconds between two checks of a worker, in a fleet of at most `interval` times CHECKS_PER_SECOND."""
        self._interval = interval
        self._next_at = float("-inf")

    def interval(self, workers: int) -> float:
        """Return the seconds between two checks of each of `workers` workers."""
        return max(self._interval, workers / CHECKS_PER_SECOND)

    def pause(self, workers: int) -> float:
        """Return `interval` with jitter, so that checks that began together drift apart."""
        return self.interval(workers) * random.uniform(0.9, 1.1)

    async def turn(self) -> None:
        """Wait until a check may start."""
        now = monotonic()
        self._next_at = max(self._next_at, now - BURST / CHECKS_PER_SECOND) + 1 / CHECKS_PER_SECOND
        if self._next_at > now:
            await asyncio.sleep(self._next_at - now)
