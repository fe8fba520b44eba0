"""Lock that is fair between tenants, for work that the router cannot afford to do twice in parallel."""

import asyncio
from collections import deque


class FairLock:
    """Lock for one event loop. Waiting tenants get it in rotation, each for its oldest request.

    A tenant with many requests therefore delays only its own.
    """

    def __init__(self) -> None:
        self._is_locked = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiters by tenant; the next tenant comes first."""

    async def acquire(self, tenant: str) -> None:
        """Wait for the lock. A cancelled caller does not hold it."""
        if not self._is_locked:
            self._is_locked = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the lock was granted at the same moment
                self.release()
            raise

    def release(self) -> None:
        """Pass the lock to the next tenant's oldest request."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            line = deque(turn for turn in self._waiting.pop(tenant) if not turn.done())  # the others were cancelled
            if not line:
                continue
            line.popleft().set_result(None)
            if line:
                self._waiting[tenant] = line  # goes to the end of the rotation
            return
        self._is_locked = False
