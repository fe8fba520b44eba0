"""One reconciler per service, from its first event until it is deleted. No finalizer: owner references remove the children."""

import asyncio
import contextvars
import logging

from fairlead_operator.kube.cache import Owner
from fairlead_operator.reconcile.reconciler import Dependencies, Reconciler

log = logging.getLogger(__name__)


class Controller:
    """The registry of reconcilers. The cache calls `wake(owner)`."""

    def __init__(self) -> None:
        self._reconcilers: dict[Owner, tuple[Reconciler, asyncio.Task[None]]] = {}
        self._dependencies: Dependencies | None = None
        self._closed = False

    def start(self, dependencies: Dependencies) -> None:
        """Start a reconciler for every service in the cache, and from now on for every new one."""
        self._dependencies = dependencies
        for owner in dependencies.cache.owners():
            self.wake(owner)

    @property
    def is_started(self) -> bool:
        return self._dependencies is not None

    def __len__(self) -> int:
        return len(self._reconcilers)

    def wake(self, owner: Owner) -> None:
        """Wake the reconciler of a service that has changed, and start one where none runs."""
        running = self._reconcilers.get(owner)
        if running is not None:
            running[0].wake()
        else:
            self._start(owner)

    def wake_all(self) -> None:
        """Wake all reconcilers: something that all services share has changed."""
        for reconciler, _ in self._reconcilers.values():
            reconciler.wake()

    def _start(self, owner: Owner) -> None:
        if self._dependencies is None or self._closed or not self._dependencies.cache.exists(owner):
            return
        reconciler = Reconciler(owner, self._dependencies)
        # Own context: a handler's context would keep its arguments, a whole decoded service, alive as long as the reconciler.
        context = contextvars.Context()
        task = asyncio.create_task(reconciler.run(), name=f"reconciler {owner[0]}/{owner[1]}", context=context)
        self._reconcilers[owner] = (reconciler, task)
        task.add_done_callback(lambda done: self._ended(owner, done), context=context)

    def _ended(self, owner: Owner, task: asyncio.Task[None]) -> None:
        self._reconcilers.pop(owner, None)
        if task.cancelled():
            return
        if task.exception() is not None:
            log.error("%s/%s: the reconciler ended with an error", *owner, exc_info=task.exception())
        self._start(owner)  # the service was created again under its name while the old reconciler ended

    async def close(self) -> None:
        self._closed = True
        tasks = [task for _, task in self._reconcilers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
