"""An event loop in its own thread, for work that must not wait for the main loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Self, TypeVar

Answer = TypeVar("Answer")
JOIN_TIMEOUT = 5.0  # seconds; the thread is idle when it is joined


class LoopThread:
    """`await thread.run(work)` runs a coroutine there. It returns its result or raises its error; a cancellation is passed on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @classmethod
    @asynccontextmanager
    async def start(cls, name: str) -> AsyncIterator[Self]:
        """Run the thread while the context lasts. All work there must have ended by then."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
        thread.start()
        try:
            yield cls(loop)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join, JOIN_TIMEOUT)
            if not thread.is_alive():
                loop.close()

    async def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @asynccontextmanager
    async def enter(self, context: AbstractAsyncContextManager[Answer]) -> AsyncIterator[Answer]:
        """Enter and leave a context there. Its value may be used only there."""
        stack = AsyncExitStack()
        try:
            yield await self.run(stack.enter_async_context(context))
        finally:
            await self.run(stack.aclose())
