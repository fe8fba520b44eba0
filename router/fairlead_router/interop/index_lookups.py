"""What clients read from the index: queries, scores, the console. Apart from routing, so that no client's read delays or stops it.

Reads have their own connection to Redis, timeout and backoff: a late reply to a client never counts as an outage for routing. They run one
at a time, tenants in rotation, so that a client with many of them delays only its own.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from fairlead_common.fair_slots import FairSlots
from fairlead_index.reader import IndexReader
from fairlead_router.errors import overloaded
from fairlead_router.routing.chooser import Ranking
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.prefix_aware import PrefixAware
from fairlead_router.routing.prefix_lookup import IndexConfig

REPLY_SECONDS: Final = 1.0
"""Deadline of a read. No request waits for it, so it may take longer than a read for routing."""
TURN_SECONDS: Final = 5.0
"""Longest wait for other reads."""


class IndexLookups:
    """Reads on behalf of clients. Each runs in its tenant's `turn`."""

    def __init__(self, policy: PrefixAware, index: IndexConfig) -> None:
        self._policy, self._slots = policy, FairSlots(1)
        self._reader = IndexReader(index.redis, index.namespace, REPLY_SECONDS, policy.trust)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold the tenant's turn. Raises ApiError 429 after TURN_SECONDS behind other reads."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                slot = await self._slots.acquire(tenant)
        except TimeoutError:
            raise overloaded("Too many queries of the index wait. Try again in 1 s.", 1) from None
        try:
            yield
        finally:
            self._slots.release(tenant, slot)

    async def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return the prompt's tokens that each worker holds, by address. Raises IndexUnavailable."""
        return await self._reader.match(hashes) if hashes else {}

    async def holders(self, hashes: Sequence[int]) -> Mapping[str, int]:
        """Return the prompt's tokens that workers hold, by address: from the mirror if it is as good as Redis, which is asked otherwise.

        The mirror of a large fleet names the deepest holders only. Raises IndexUnavailable.
        """
        if self._policy.prefers_copy:
            return self._policy.predict(RoutingRequest(hashes=hashes))
        return await self.match(hashes)

    async def rank(self, request: RoutingRequest) -> Ranking:
        """Return the workers that a choice compares now, best first, without a reservation."""
        return await self._policy.rank(request, self._reader)

    async def close(self) -> None:
        await self._reader.close()
