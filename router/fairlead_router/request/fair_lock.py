"""One at a time, and tenants by turns: for work of which the router cannot afford two pieces at once."""

import asyncio
from collections import deque


class FairLock:
    """`take` a turn, and `give_back` it. Of those that wait, tenants come one after the other, each with its oldest: who sends many waits
    for his own. Call it from one event loop."""

    def __init__(self) -> None:
        self._is_locked = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant, the next one first."""

    async def acquire(self, tenant: str) -> None:
        """Returns when it is this caller's turn. One that is cancelled meanwhile has none."""
        if not self._is_locked:
            self._is_locked = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at the same moment
                self.release()
            raise

    def release(self) -> None:
        """The next one's turn."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            line = deque(turn for turn in self._waiting.pop(tenant) if not turn.done())  # the others were cancelled
            if not line:
                continue
            line.popleft().set_result(None)
            if line:
                self._waiting[tenant] = line  # behind the others
            return
        self._is_locked = False
