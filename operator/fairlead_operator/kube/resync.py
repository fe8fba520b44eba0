"""Lists everything again every few minutes: finds deletions that a watch missed, and detects a dead watch.

After a gap kopf relists services, and reports what exists, not what was deleted. production-stack#1091 lost 22 hours to such a gap.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import product

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import Cluster
from fairlead_operator.kube.kinds import CHILDREN, PROFILES, SERVICES
from fairlead_operator.kube.reflector import NotServed, relist

log = logging.getLogger(__name__)
PERIOD = 300.0  # seconds between two resyncs
RETRY = 15.0  # seconds after a resync that failed
STALE = 3 * PERIOD  # seconds without a resync, after which liveness fails and the kubelet restarts the process


class Resync:
    """Lists all kinds periodically. `seconds_since_resync` is part of the liveness check."""

    def __init__(self, cluster: Cluster, cache: Cache, namespaces: Sequence[str] = ("",)) -> None:
        self._cluster = cluster
        self._cache = cache
        self._namespaces = namespaces
        self._last = time.monotonic()

    @property
    def seconds_since_resync(self) -> float:
        """Seconds since the last resync."""
        return time.monotonic() - self._last

    async def run(self) -> None:
        pause = PERIOD
        while True:
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = PERIOD if await self._try() else RETRY

    async def _try(self) -> bool:
        try:
            missed_deletions = await self.resync()
        except Exception as error:
            log.warning("resync failed, again in %.0f s: %s: %s", RETRY, type(error).__name__, error)
            return False
        if missed_deletions:
            log.warning("the watches had missed %d removals", missed_deletions)
        self._last = time.monotonic()
        return True

    async def resync(self) -> int:
        missed_deletions = 0
        for namespace, kind in product(self._namespaces, (SERVICES, PROFILES, *CHILDREN)):
            with suppress(NotServed):
                missed_deletions += (await relist(self._cluster, self._cache, kind, namespace)).missed_deletions
        return missed_deletions
