"""Tasks of the process's life, which nobody awaits: one that fails by a fault of ours says so, and goes on."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from prometheus_client import Counter

from fairlead_index.redis.backoff import Backoff

logger = logging.getLogger(__name__)

PAUSE_SECONDS = (1.0, 30.0)
"""After the first failure, and the longest after many in a row."""
WELL_SECONDS = 60.0
"""What has run for so long counts as well again."""


def keep(name: str, work: Callable[[], Coroutine[Any, Any, None]], failures: Counter) -> asyncio.Task[None]:
    """A task that does `work`, and begins it again after a pause when it raises. It ends when `work` returns, or cancelled.

    `failures`: counts what it raised, by `name` (its label `task`).
    """
    return asyncio.create_task(_kept(name, work, failures), name=name)


async def _kept(name: str, work: Callable[[], Coroutine[Any, Any, None]], failures: Counter) -> None:
    shortest, longest = PAUSE_SECONDS
    pause = Backoff(first=shortest, longest=longest)
    while True:
        began = monotonic()
        try:
            await work()
            return
        except Exception as error:
            if monotonic() - began >= WELL_SECONDS:
                pause.reset()
            seconds = pause.record_failure(repr(error))
            failures.labels(name).inc()
            logger.exception("task %r failed, and begins again in %.0f s", name, seconds)
        await asyncio.sleep(seconds)
