"""The periodic task that all pollers share."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)
RETRY = 10.0  # seconds after an error


class PeriodicTask:
    """One task that awaits `action`, and then pauses for the seconds that it returns.

    An error is logged, and the next call comes after RETRY: a task that had ended would look like one that still polls.
    """

    def __init__(self, action: Callable[[], Awaitable[float]]) -> None:
        self._action = action
        self._task: asyncio.Task[None] | None = None

    def start(self, name: str, delay: float = 0.0) -> None:
        """Start, with the first call after `delay` seconds. Does nothing while the task runs."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(delay), name=name)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = None

    async def _run(self, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            try:
                pause = await self._action()
            except Exception as error:
                pause = RETRY
                task = asyncio.current_task()
                log.warning("%s, again in %.0f s: %s: %s", task.get_name() if task else "", pause, type(error).__name__, error)
