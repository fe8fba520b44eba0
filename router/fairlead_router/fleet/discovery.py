"""Follows discovery: the addresses that requests may go to."""

import asyncio
import contextlib
import logging

from fairlead_common.discovery import DiscoveryError, Source
from fairlead_router.fleet.workers import WorkerTable

logger = logging.getLogger(__name__)

HURRY_SECONDS = 0.25
"""Between two questions, at least: the index may speak of an address that discovery does not know for long."""


async def follow(source: Source, table: WorkerTable, interval: float, hurry: asyncio.Event) -> None:
    """Ask again every `interval` seconds, for ever, and sooner when there is `hurry`; says so once when the source stops and starts to
    answer."""
    lost = False
    while True:
        hurry.clear()
        try:
            table.discovered(await source.addresses())
            if lost:
                logger.info("discovery answers again")
            lost = False
        except Exception as error:  # whatever it is, the next answer may be good, and without this task none would come
            if not lost:
                logger.warning("discovery has no answer, the known workers stay: %s", error, exc_info=not isinstance(error, DiscoveryError))
            lost = True
        await asyncio.sleep(min(interval, HURRY_SECONDS))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, interval - HURRY_SECONDS)):
                await hurry.wait()
