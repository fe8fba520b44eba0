"""How many passes run at the same time, and whose turn it is: what somebody has edited goes before what is only looked at again, but for
every fourth turn: while a thousand services are being made, one that serves must still be scaled, rolled out and told of its pods."""

import asyncio
from collections import deque

BACKGROUND_EVERY = 4  # of so many turns one is of those that are not urgent


class WorkQueue:
    """Like a semaphore with two queues. A thousand services that a new leader has to look at do not keep an edit waiting, nor what the API
    server answers to it: a pass that finds nothing to do never waits, so each begins only after the event loop has looked for answers.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._released = 0  # turns
        self._waiting: dict[bool, deque[asyncio.Future[None]]] = {True: deque(), False: deque()}  # urgent or not

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
            if future.done() and not future.cancelled():  # it was given to us in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Gives the lane to the next, or back."""
        self._released += 1
        urgent_first = self._released % BACKGROUND_EVERY != 0
        for waiting in (self._waiting[urgent_first], self._waiting[not urgent_first]):
            while waiting:
                future = waiting.popleft()
                if not future.done():
                    future.set_result(None)
                    return
        self._free += 1
