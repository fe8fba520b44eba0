"""Now and then everything is listed anew: a removal that a watch has missed is found, and a dead watch does not go unnoticed.

Of services kopf relists after a gap, and then reports what exists, not what has gone; production-stack#1091 lost 22 hours to such a gap.
"""

import asyncio
import logging
import random
import time
from contextlib import suppress

from fairlead_operator.kube.cache import Store
from fairlead_operator.kube.client import Cluster
from fairlead_operator.kube.kinds import CHILDREN, SERVICES
from fairlead_operator.kube.reflector import NotServed, relist

log = logging.getLogger(__name__)
PERIOD = 300.0  # seconds between two rounds
RETRY = 15.0  # seconds after a round that failed
STALE = 3 * PERIOD  # seconds without a round: the process is of no use, and says so to the kubelet


class Resync:
    """Rounds of listing. `stale` is what liveness asks."""

    def __init__(self, cluster: Cluster, store: Store, namespace: str = "") -> None:
        self._cluster = cluster
        self._store = store
        self._namespace = namespace
        self._last = time.monotonic()

    @property
    def stale(self) -> bool:
        return self.age > STALE

    @property
    def age(self) -> float:
        """Seconds since the last round."""
        return time.monotonic() - self._last

    async def run(self) -> None:
        pause = PERIOD
        while True:
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = PERIOD if await self._try() else RETRY

    async def _try(self) -> bool:
        try:
            missed = await self.once()
        except Exception as error:
            log.warning("resync failed, again in %.0f s: %s: %s", RETRY, type(error).__name__, error)
            return False
        if missed:
            log.warning("the watches had missed %d removals", missed)
        self._last = time.monotonic()
        return True

    async def once(self) -> int:
        missed = 0
        for kind in (SERVICES, *CHILDREN):
            with suppress(NotServed):
                missed += (await relist(self._cluster, self._store, kind, self._namespace)).missed
        return missed
