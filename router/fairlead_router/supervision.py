"""Tasks of the process's life, which nobody awaits: one that fails by a fault of ours says so, and goes on."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from prometheus_client import Counter

from fairlead_index.redis.backoff import Pause

logger = logging.getLogger(__name__)

BACKOFF_SECONDS = (1.0, 30.0)
"""After the first failure, and the longest after many in a row."""
HEALTHY_SECONDS = 60.0
"""What has run for so long counts as well again."""


def supervise(name: str, work: Callable[[], Coroutine[Any, Any, None]], failures: Counter) -> asyncio.Task[None]:
    """A task that does `work`, and begins it again after a pause when it raises. It ends when `work` returns, or cancelled.

    `failures`: counts what it raised, by `name` (its label `task`).
    """
    return asyncio.create_task(_run_and_restart(name, work, failures), name=name)


async def _run_and_restart(name: str, work: Callable[[], Coroutine[Any, Any, None]], failures: Counter) -> None:
    shortest, longest = BACKOFF_SECONDS
    pause = Pause(first=shortest, longest=longest)
    while True:
        began = monotonic()
        try:
            await work()
            return
        except Exception as error:
            if monotonic() - began >= HEALTHY_SECONDS:
                pause.succeeded()
            seconds = pause.failed(repr(error))
            failures.labels(name).inc()
            logger.exception("task %r failed, and begins again in %.0f s", name, seconds)
        await asyncio.sleep(seconds)
