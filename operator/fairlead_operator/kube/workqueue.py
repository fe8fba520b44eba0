"""Bounds the number of concurrent reconciles, and orders them: edited services come before periodic work, except in every fourth turn.

While a thousand services are being created, a serving one must still be scaled, rolled out and kept up to date.
"""

import asyncio
from collections import deque

BACKGROUND_EVERY = 4  # every so many turns one goes to a reconcile that is not urgent


class WorkQueue:
    """A semaphore with two queues.

    A thousand services that a new leader reconciles must not delay an edit, nor the API server's responses to it. A reconcile without any
    work never waits, so each one starts only after the event loop has polled for responses.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._released = 0  # number of releases
        self._waiting: dict[bool, deque[asyncio.Future[None]]] = {True: deque(), False: deque()}  # by urgency

    async def acquire(self, *, urgent: bool) -> None:
        if self._free:
            self._free -= 1
        else:
            await self._wait_turn(urgent)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.release()
            raise

    async def _wait_turn(self, urgent: bool) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting[urgent].append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # the turn was granted at the same moment as the cancellation
                self.release()
            raise

    def release(self) -> None:
        """Pass the slot on to the next waiter, or free it."""
        self._released += 1
        urgent_first = self._released % BACKGROUND_EVERY != 0
        for waiting in (self._waiting[urgent_first], self._waiting[not urgent_first]):
            while waiting:
                future = waiting.popleft()
                if not future.done():
                    future.set_result(None)
                    return
        self._free += 1
