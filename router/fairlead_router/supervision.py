"""Supervision of background tasks: a task that raises is logged, counted, and restarted after a backoff."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from prometheus_client import Counter

from fairlead_index.redis.backoff import Backoff

logger = logging.getLogger(__name__)

BACKOFF_SECONDS = (1.0, 30.0)
"""Shortest and longest backoff, seconds."""
HEALTHY_SECONDS = 60.0
"""Uptime that resets the backoff."""


def supervise(name: str, work: Callable[[], Coroutine[Any, Any, None]], failures: Counter) -> asyncio.Task[None]:
    """Start a task that runs `work` and restarts it after a backoff when it raises. The task ends when `work` returns or is cancelled.

    `failures`: counter of exceptions, with `name` as its label `task`.
    """
    failures.labels(name)  # a counter that begins at 0 shows its first increase
    return asyncio.create_task(_run_and_restart(name, work, failures), name=name)


async def stop_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks, and wait until they have ended. None: a task that was not started."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


async def _run_and_restart(name: str, work: Callable[[], Coroutine[Any, Any, None]], failures: Counter) -> None:
    shortest, longest = BACKOFF_SECONDS
    pause = Backoff(first=shortest, longest=longest)
    while True:
        began = monotonic()
        try:
            await work()
            return
        except Exception as error:
            if monotonic() - began >= HEALTHY_SECONDS:
                pause.reset()
            seconds = pause.record_failure(repr(error))
            failures.labels(name).inc()
            logger.exception("task %r failed; restarting it in %.0f s", name, seconds)
        await asyncio.sleep(seconds)
