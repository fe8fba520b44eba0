"""One loop for each service, from when the store has it until it is gone. No finalizer: owner references do the removal."""

import asyncio
import contextvars
import logging

from fairlead_operator.kube.cache import Owner
from fairlead_operator.reconcile.reconciler import Loop, Tools

log = logging.getLogger(__name__)


class Fleet:
    """The registry of loops. `wake(owner)` is the store's callback."""

    def __init__(self) -> None:
        self._loops: dict[Owner, tuple[Loop, asyncio.Task[None]]] = {}
        self._tools: Tools | None = None
        self._closed = False

    def open(self, tools: Tools) -> None:
        """From now on every service of the store has a loop."""
        self._tools = tools
        for owner in tools.store.owners():
            self.wake(owner)

    @property
    def opened(self) -> bool:
        return self._tools is not None

    def __len__(self) -> int:
        return len(self._loops)

    def wake(self, owner: Owner) -> None:
        """Something of this service has changed, however that was learnt. A service without a loop gets one."""
        running = self._loops.get(owner)
        if running is not None:
            running[0].wake()
        else:
            self._start(owner)

    def wake_all(self) -> None:
        """Something that all services share has changed."""
        for loop, _ in self._loops.values():
            loop.wake()

    def _start(self, owner: Owner) -> None:
        if self._tools is None or self._closed or not self._tools.store.exists(owner):
            return
        loop = Loop(owner, self._tools)
        # A context of its own for both: a handler's would keep what it was called with, a whole decoded service, as long as the loop lives.
        context = contextvars.Context()
        task = asyncio.create_task(loop.run(), name=f"loop {owner[0]}/{owner[1]}", context=context)
        self._loops[owner] = (loop, task)
        task.add_done_callback(lambda done: self._ended(owner, done), context=context)

    def _ended(self, owner: Owner, task: asyncio.Task[None]) -> None:
        self._loops.pop(owner, None)
        if task.cancelled():
            return
        if task.exception() is not None:
            log.error("%s/%s: the loop has ended with an error", *owner, exc_info=task.exception())
        self._start(owner)  # if it was made again under its name while the old one's loop was ending

    async def close(self) -> None:
        self._closed = True
        tasks = [task for _, task in self._loops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
