"""Where a prompt's cached prefixes are: from this router's copy of the index, or from Redis."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Counter

from fairlead_index.mirror.prefixes import MirrorReader
from fairlead_index.mirror.workers import FleetReader
from fairlead_index.reader import IndexReader, IndexUnavailable, Trust
from fairlead_index.redis.access import RedisAccess
from fairlead_index.score import CONSIDERED
from fairlead_router.config import IndexMode
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.chooser import Chooser, Prefixes
from fairlead_router.routing.policies import RoutingRequest, Tried
from fairlead_router.supervision import stop_tasks, supervise

logger = logging.getLogger(__name__)

AUTO_BLOCKS = 2_000_000
"""Largest fleet that `auto` mirrors, in blocks of KV capacity. A block takes about 90 bytes if no two workers hold the same one."""
SIZE_CHECK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Location of the index, and how it is read."""

    redis: RedisAccess
    namespace: str
    mode: IndexMode = "auto"


class PrefixLookup:
    """Finds prefixes in the copy of the index while that is as good as Redis, else in Redis."""

    def __init__(
        self, table: WorkerTable, index: IndexConfig, fleet: FleetReader, chooser: Chooser, trusts: Trust, failures: Counter
    ) -> None:
        """`failures`: counter of task failures, by name."""
        self._table, self._index, self._fleet, self._chooser, self._trusts, self._failures = table, index, fleet, chooser, trusts, failures
        self.reader = IndexReader(index.redis, index.namespace, trusts=trusts)
        self.copy: MirrorReader | None = None
        self._size_check: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._fleet.start()
        if self._index.mode == "mirror":
            self._start_copy()
        elif self._index.mode == "auto":
            self._size_check = supervise("mirror size", self._check_size, self._failures)

    async def close(self) -> None:
        await stop_tasks(self._size_check)
        if self.copy is not None:
            await self.copy.close()
        await self._fleet.close()
        await self.reader.close()

    @property
    def has_copy(self) -> bool:
        """Whether the copy has a snapshot."""
        return self.copy is not None and self.copy.stats.snapshots > 0

    @property
    def prefers_copy(self) -> bool:
        """Whether the copy is as good as Redis, or better: it is current, or Redis does not answer."""
        return self.has_copy and (self._is_current or not self._fleet.is_fresh)

    async def find(self, request: RoutingRequest, tried: Tried, reader: IndexReader | None = None) -> Prefixes:
        """Return the prompt's prefixes. Nothing is awaited while the copy is preferred. `reader`: None for that of routing."""
        if not self.prefers_copy:
            try:
                return Prefixes(await self._match(request, tried, reader or self.reader), "remote")
            except IndexUnavailable:
                if self._fleet.is_fresh and not self.has_copy:
                    return Prefixes({}, "late")
        return self.find_in_copy(request, tried)

    def find_in_copy(self, request: RoutingRequest, tried: Tried = ()) -> Prefixes:
        """Return the prompt's prefixes by the copy."""
        copy, held = self.copy, dict[str, int]()
        if copy is None or not self.has_copy:
            return Prefixes({}, "local")
        soonest, allowed = self._chooser.soonest(request, tried), self._table.eligible_addresses(tried, request.model)
        for hashes in request.chains:
            held |= copy.deepest(hashes, CONSIDERED, allowed, soonest) if soonest else copy.match(hashes)
        return Prefixes(held, "mirror" if self._is_current else "outdated")

    async def held(self, request: RoutingRequest, worker: Worker) -> int:
        """Return the prompt's tokens that the worker holds, by the copy, or by Redis without one. Raises IndexUnavailable."""
        hashes = request.hashes_of(worker)
        found = self.copy.match(hashes) if self.copy is not None and self.has_copy else await self.reader.match(hashes)
        return found.get(worker.address, 0)

    def unique_shares(self) -> dict[str, float]:
        """Return the share of each worker's blocks that no other worker holds, by address; empty without a copy."""
        return self.copy.unique_shares() if self.copy is not None else {}

    def recheck_trust(self) -> None:
        """Apply changed trust soon."""
        self._fleet.read_soon()
        if self.copy is not None:
            self.copy.check_soon()

    @property
    def _is_current(self) -> bool:
        """Whether the copy follows the index's log without a gap."""
        return self._fleet.is_fresh and self.copy is not None and self.copy.stats.following

    async def _match(self, request: RoutingRequest, tried: Tried, reader: IndexReader) -> Mapping[str, int]:
        chains = [hashes for hashes in request.chains if len(hashes)]
        if soonest := self._chooser.soonest(request, tried):
            excluded = self._fleet.slots_of(self._table.unusable_addresses(request.model) | {address for address, _ in tried})
            calls = [reader.deepest(hashes, CONSIDERED, excluded, self._fleet.slots_of(soonest)) for hashes in chains]
        else:
            calls = [reader.match(hashes) for hashes in chains]
        return {address: tokens for found in await asyncio.gather(*calls) for address, tokens in found.items()}

    async def _check_size(self) -> None:
        """Mirror while the fleet is small enough, and stop when it exceeds the limit by a quarter."""
        while True:
            if self.copy is None and self._fleet.is_fresh and self._fleet.capacity <= AUTO_BLOCKS:
                self._start_copy()
            elif self.copy is not None and self._fleet.capacity > 1.25 * AUTO_BLOCKS:
                logger.info(
                    "the fleet has a capacity of %d blocks, too many for a mirror: routing through Redis instead", self._fleet.capacity
                )
                copy, self.copy = self.copy, None
                await copy.close()
            await asyncio.sleep(SIZE_CHECK_SECONDS if self._fleet.is_fresh else 0.1)

    def _start_copy(self) -> None:
        self.copy = MirrorReader(self._index.redis, self._index.namespace, trusts=self._trusts)
        self.copy.start()
