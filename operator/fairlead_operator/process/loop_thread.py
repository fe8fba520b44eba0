"""An event loop in a thread of its own, for what must not wait until everything else has had its turn."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Self, TypeVar

Answer = TypeVar("Answer")
_JOIN = 5.0  # seconds; the thread has nothing left to do when it is joined


class LoopThread:
    """`await aside.do(work)` runs a coroutine there and gives its answer here, or raises what it raised; cancelling cancels it there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @classmethod
    @asynccontextmanager
    async def start(cls, name: str) -> AsyncIterator[Self]:
        """The thread runs while the context lasts. Whatever was begun there has to be over by then."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
        thread.start()
        try:
            yield cls(loop)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join, _JOIN)
            if not thread.is_alive():
                loop.close()

    async def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @asynccontextmanager
    async def enter(self, context: AbstractAsyncContextManager[Answer]) -> AsyncIterator[Answer]:
        """Enter and leave a context there; what it gives is to be used there only."""
        stack = AsyncExitStack()
        try:
            yield await self.run(stack.enter_async_context(context))
        finally:
            await self.run(stack.aclose())
