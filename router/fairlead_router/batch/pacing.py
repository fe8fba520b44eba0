"""How many lines are in flight: additive increase while the service answers, halved while it is busy, shared equally by tenants."""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

FIRST_LIMIT = 4.0


class ConcurrencyLimit:
    """Additive increase, multiplicative decrease, as TCP (RFC 5681). Pure: callers pass the time."""

    def __init__(self, maximum: int) -> None:
        self._maximum = float(maximum)
        self.limit = min(FIRST_LIMIT, self._maximum)
        self.paused_until = 0.0
        self._decreased_at = 0.0

    def record_success(self) -> None:
        """Add one for each round of answers."""
        self.limit = min(self._maximum, self.limit + 1 / self.limit)

    def record_busy(self, sent_at: float, now: float, retry_after: float) -> None:
        """Halve the limit, once for the requests that were in flight together, and send nothing for `retry_after` seconds."""
        self.paused_until = max(self.paused_until, now + retry_after)
        if sent_at >= self._decreased_at:
            self.limit = max(1.0, self.limit / 2)
            self._decreased_at = now


class Slots:
    """Slots for lines in flight. A free slot goes to the waiting tenants in turn."""

    def __init__(self, limit: ConcurrencyLimit, clock: Callable[[], float] = monotonic) -> None:
        self.limit, self._clock = limit, clock
        self.in_use = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, tenant: str) -> None:
        """Wait for a slot."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        self._grant()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release()
            raise

    def now(self) -> float:
        """Return the time of the clock by which slots pause."""
        return self._clock()

    def release(self) -> None:
        self.in_use -= 1
        self._grant()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _grant(self) -> None:
        pause = self.limit.paused_until - self._clock()
        if pause > 0:
            if self._timer is None and self._waiting:
                self._timer = asyncio.get_running_loop().call_later(pause, self._resume)
            return
        while self._waiting and self.in_use < int(self.limit.limit):
            tenant = next(iter(self._waiting))
            places = self._waiting.pop(tenant)
            place = places.popleft()
            if places:
                self._waiting[tenant] = places  # at the end: the other tenants come first
            if not place.done():
                place.set_result(None)
                self.in_use += 1

    def _resume(self) -> None:
        self._timer = None
        self._grant()
