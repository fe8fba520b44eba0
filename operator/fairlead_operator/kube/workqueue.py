"""How many passes run at the same time, and whose turn it is: what somebody has edited goes before what is only looked at again, but for
every fourth turn: while a thousand services are being made, one that serves must still be scaled, rolled out and told of its pods."""

import asyncio
from collections import deque

OTHERS = 4  # of so many turns one is of those that are not urgent


class Lanes:
    """Like a semaphore with two queues. A thousand services that a new leader has to look at do not keep an edit waiting, nor what the API
    server answers to it: a pass that finds nothing to do never waits, so each begins only after the event loop has looked for answers.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._given = 0  # turns
        self._waiting: dict[bool, deque[asyncio.Future[None]]] = {True: deque(), False: deque()}  # urgent or not

    async def acquire(self, *, urgent: bool) -> None:
        if self._free:
            self._free -= 1
        else:
            await self._turn(urgent)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.release()
            raise

    async def _turn(self, urgent: bool) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[urgent].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given to us in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Gives the lane to the next, or back."""
        self._given += 1
        first = self._given % OTHERS != 0
        for waiting in (self._waiting[first], self._waiting[not first]):
            while waiting:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1
