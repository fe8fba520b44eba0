"""Discovery loop: keeps the worker table's addresses current."""

import asyncio
import contextlib
import logging

from fairlead_common.discovery import DiscoveryError, Source
from fairlead_router.fleet.workers import WorkerTable

logger = logging.getLogger(__name__)

MIN_INTERVAL_SECONDS = 0.25
"""Shortest interval between queries: the index may hold an address that discovery does not know for a long time."""


async def follow_discovery(source: Source, table: WorkerTable, interval: float, refresh: asyncio.Event) -> None:
    """Query discovery every `interval` seconds, and earlier when `refresh` is set. Log once when the source stops or resumes answering."""
    is_lost = False
    while True:
        refresh.clear()
        try:
            table.set_addresses(await source.addresses())
            if is_lost:
                logger.info("discovery answers again")
            is_lost = False
        except Exception as error:  # any error: the next query may succeed, so this task must go on
            if not is_lost:
                logger.warning(
                    "discovery does not answer; the known workers stay in use: %s", error, exc_info=not isinstance(error, DiscoveryError)
                )
            is_lost = True
        await asyncio.sleep(min(interval, MIN_INTERVAL_SECONDS))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, interval - MIN_INTERVAL_SECONDS)):
                await refresh.wait()
