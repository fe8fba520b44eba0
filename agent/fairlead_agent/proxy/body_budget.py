"""Budget for the request bodies in memory, from their first byte until the engine's answers begin.

No body waits for room, so none can block another. Without room, the arriving body that has held the most bytes for the longest time is
refused (bytes times seconds): slow and large ones go first, and a short body that comes at once is read.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fairlead_agent.proxy.body import Refused


class BodyBudget:
    """Budget in bytes, for one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.arriving: dict[HeldBody, asyncio.Timeout] = {}
        """Bodies that may be refused, and what wakes their readers."""
        self.total = 0

    @contextmanager
    def hold(self) -> Iterator["HeldBody"]:
        """Hold one body while the context lasts. It has no bytes yet."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            body.release()

    def make_room(self) -> None:
        """Refuse arriving bodies until the others fit, as far as they can."""
        now = asyncio.get_running_loop().time()
        while self.total > self._limit and self.arriving:
            body = max(self.arriving, key=lambda one: one.size * (now - one.began))
            deadline = self.arriving.pop(body)
            if not deadline.expired():
                deadline.reschedule(now)
            body.is_refused = True
            body.release()

    @property
    def is_exceeded(self) -> bool:
        return self.total > self._limit


class HeldBody:
    """Bytes of one body in the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size = 0
        self.began = asyncio.get_running_loop().time()
        self.is_refused = False

    @asynccontextmanager
    async def arriving(self, seconds: float) -> AsyncIterator[None]:
        """Let the body arrive within the context. Raises Refused: 408 after `seconds`, 429 if the budget needs its room."""
        try:
            async with asyncio.timeout(seconds) as deadline:
                self._budget.arriving[self] = deadline
                yield
        except TimeoutError:
            if not self.is_refused:
                raise Refused(408, "the request's body took too long to arrive") from None
        finally:
            self._budget.arriving.pop(self, None)
        if self.is_refused:
            raise self._no_room()

    def resize(self, size: int) -> None:
        """Set the body's bytes. Raises Refused 429 without room for them."""
        if not self.is_refused:
            self._budget.total += size - self.size
            self.size = size
            if self._budget.is_exceeded:
                self._budget.make_room()
        if self.is_refused or self._budget.is_exceeded:
            self.release()
            raise self._no_room()

    def release(self) -> None:
        """Return the bytes. Idempotent."""
        self._budget.total -= self.size
        self.size = 0

    @staticmethod
    def _no_room() -> Refused:
        return Refused(429, "this worker holds as many bytes of request bodies as it may (--max-inflight-bytes): try again in 1 s")
