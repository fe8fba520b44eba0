"""A small number of slots, shared fairly between tenants, for work that a process cannot afford to do more often in parallel."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class FairSlots:
    """Slots for one event loop. A tenant has one at a time, and waiting tenants get them in rotation, each for its oldest request.

    A tenant with many requests therefore delays only its own, and while there are several slots, others need not wait for its current one.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._holders: set[str] = set()
        self._waiting: dict[str, deque[asyncio.Future[int]]] = {}
        """Waiters by tenant; the next tenant comes first."""

    async def acquire(self, tenant: str) -> int:
        """Wait for a slot and return its number, the lowest free one. A cancelled caller does not hold it."""
        if self._free and tenant not in self._holders:
            return self._take(tenant)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot was granted at the same moment
                self.release(tenant, turn.result())
            raise

    async def run(
        self, tenant: str, start: Callable[[int], "asyncio.Future[Result]"], ended: Callable[[int], None] = lambda slot: None
    ) -> Result:
        """Start work in a thread when it is the tenant's turn, and return its result. `start` and `ended` get the slot.

        If the caller is cancelled, the slot is held until the work ends.
        """
        slot = await self.acquire(tenant)
        running = start(slot)

        def release(done: "asyncio.Future[Result]") -> None:
            if not done.cancelled():
                done.exception()  # marks it as retrieved; a caller that still waits gets it too
            ended(slot)
            self.release(tenant, slot)

        running.add_done_callback(release)
        try:
            return await asyncio.shield(running)
        finally:
            del running  # its exception refers to this frame, and only a garbage collection would free the body

    def release(self, tenant: str, slot: int) -> None:
        """Free a slot and grant it to the next tenant's oldest request."""
        self._free.append(slot)
        self._free.sort()
        self._holders.discard(tenant)
        for waiting in list(self._waiting):
            if not self._free:
                return
            if waiting in self._holders:
                continue
            line = deque(turn for turn in self._waiting.pop(waiting) if not turn.done())  # the others were cancelled
            if line:
                line.popleft().set_result(self._take(waiting))
            if line:
                self._waiting[waiting] = line  # goes to the end of the rotation

    def _take(self, tenant: str) -> int:
        self._holders.add(tenant)
        return self._free.pop(0)
