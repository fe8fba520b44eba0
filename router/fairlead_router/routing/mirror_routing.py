"""Choosing by this router's own copy of the index: a match and a score in its memory, and the reservation told to the others at once."""

import asyncio
import logging
import os
from collections.abc import Iterable
from itertools import chain, islice

from prometheus_client import Counter

from fairlead_index.hashing import hash_bytes
from fairlead_index.mirror.prefixes import MirrorReader
from fairlead_index.mirror.workers import FleetReader
from fairlead_index.reader import IndexUnavailable, Trust
from fairlead_index.redis.access import RedisAccess
from fairlead_index.score import CONSIDERED, HOLDERS, SMALL_FLEET, ScoredWorker, best_starts
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.local_fallback import BLOCK_TOKENS, score_locally
from fairlead_router.routing.policies import Choice, RoutingRequest, Tried
from fairlead_router.supervision import supervise

logger = logging.getLogger(__name__)

AUTO_BLOCKS = 2_000_000
"""What `auto` mirrors at most: blocks that the workers could hold, at about 90 bytes each where no two hold the same."""
SIZE_CHECK_SECONDS = 1.0
MAX_UNINDEXED = 4
"""Of a large fleet's soonest workers, those looked at in case the index does not name them."""


class MirrorRouting:
    """`choose` gives None until there is a picture, and where none is kept. While Redis is away the last one serves."""

    def __init__(
        self, table: WorkerTable, redis: RedisAccess, namespace: str, most_blocks: int | None, failures: Counter, trusts: Trust
    ) -> None:
        """`most_blocks`: a larger fleet is not mirrored; None: any. `failures`: of tasks, by name."""
        self._table, self._redis, self._namespace, self._most = table, redis, namespace, most_blocks
        self._failures, self._trusts = failures, trusts
        self.fleet = FleetReader(redis, namespace, trusts=trusts)
        self._mirror: MirrorReader | None = None
        self._guarding: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._table.on_incarnation = self._recheck_trust
        self.fleet.start()
        if (most := self._most) is None:
            self._start_mirror()
        else:
            self._guarding = supervise("mirror guard", lambda: self._check_size(most), self._failures)

    @property
    def is_ready(self) -> bool:
        """Whether there is a picture to choose by."""
        return self._mirror is not None and self._mirror.stats.snapshots > 0

    @property
    def is_preferred(self) -> bool:
        """Whether Redis has nothing better to say: the picture is of now, or nobody answers there."""
        return self.is_ready and (self.is_current or not self.fleet.fresh)

    @property
    def is_current(self) -> bool:
        """Whether the picture is of now."""
        return self.fleet.fresh and self._mirror is not None and self._mirror.stats.following

    def choose(self, wanted: RoutingRequest, tried: Tried) -> Choice | None:
        mirror, fresh, table = self._mirror, self.fleet.fresh, self._table
        if mirror is None:
            return None
        allowed = table.usable(tried, wanted.model)
        try:
            if len(allowed) <= SMALL_FLEET:
                held = mirror.match(wanted.hashes)
                cold = wanted.hashes and not any(worker.address in held for worker in allowed)
                homes = table.homes(wanted.hashes[0], 2, table.eligible_addresses(tried, wanted.model)) if cold else []
                workers: Iterable[Worker] = allowed
            else:
                held, homes, workers = self._candidates(mirror, wanted, tried, fresh)
        except IndexUnavailable:
            return None
        scored = [self._score(worker, held.get(worker.address, 0), fresh) for worker in workers]
        if not scored:
            return None
        best = best_starts(scored, hash_bytes(wanted.hashes), wanted.prompt_tokens, os.urandom(8), 1, homes)[0]
        worker = table.get(best.address)
        assert worker is not None  # nothing was awaited since it was listed
        return Choice(worker, best.cached, self.fleet.reserve(best.address, best.cost))

    def _candidates(
        self, mirror: MirrorReader, wanted: RoutingRequest, tried: Tried, fresh: bool
    ) -> tuple[dict[str, int], list[str], Iterable[Worker]]:
        """Of a large fleet what each of some workers holds, the prompt's homes, and those workers: as route.lua chooses whom it scores.

        The homes of a prompt that nobody holds, the deepest holders, then the soonest, CONSIDERED in all; and workers that the index does
        not name, as far as they are among the soonest by this router's own picture.
        """
        table, model = self._table, wanted.model

        may = table.eligible_addresses(tried, model)
        own = [worker.address for worker in table.soonest(MAX_UNINDEXED if fresh else CONSIDERED, tried, model)]
        soonest = [address for address in own if not fresh or address not in self.fleet.workers]
        soonest += islice((address for address in self.fleet.soonest if address in may), CONSIDERED - len(soonest)) if fresh else ()
        held = mirror.deepest(wanted.hashes, CONSIDERED, may, soonest)
        homes = table.homes(wanted.hashes[0], 2, may) if wanted.hashes and not held else []
        found: dict[str, Worker] = {}
        for address in chain(homes, islice(held, HOLDERS), soonest):
            if (worker := table.get(address)) is not None and len(found) < CONSIDERED:
                found[address] = worker
        return held, homes, found.values()

    def unique_shares(self) -> dict[str, float]:
        """Of what each worker (by address) holds, the share that no other does; empty before there is a picture."""
        return self._mirror.held_alone() if self._mirror is not None else {}

    def held(self, wanted: RoutingRequest, address: str) -> int | None:
        """Tokens of the prompt that the index sees there now; None where no picture is kept."""
        if self._mirror is None:
            return None
        try:
            return self._mirror.match(wanted.hashes).get(address, 0)
        except IndexUnavailable:
            return None

    async def close(self) -> None:
        if self._guarding is not None:
            self._guarding.cancel()
        await self.fleet.close()
        if self._mirror is not None:
            await self._mirror.close()

    def _score(self, worker: Worker, held: int, fresh: bool) -> ScoredWorker:
        """By the index's load and everybody's reservations; while Redis is away, by what the worker says of itself, and ours."""
        scored = self.fleet.workers.get(worker.address)
        if scored is not None and fresh:
            self.fleet.refresh(scored)
            backlog = max(0.0, scored.backlog - scored.rate * scored.load_age)
            scored.owed = max(scored.owed, worker.pending_tokens - backlog)  # ours, of which no load may say that they are done
        else:
            known = self._mirror.block_tokens_of(worker.address) if self._mirror is not None else 0
            block_tokens = known or BLOCK_TOKENS
            scored = score_locally(worker, block_tokens)
        scored.depth = held // scored.block_tokens
        return scored

    def _recheck_trust(self) -> None:
        self.fleet.look_soon()
        if self._mirror is not None:
            self._mirror.pulse_soon()

    async def _check_size(self, most: int) -> None:
        """Mirror while the fleet is small enough, and stop when it has clearly outgrown that."""
        while True:
            if self._mirror is None and self.fleet.fresh and self.fleet.capacity <= most:
                self._start_mirror()
            elif self._mirror is not None and self.fleet.capacity > 1.25 * most:
                logger.info("the fleet could hold %d blocks, more than are mirrored: Redis is asked instead", self.fleet.capacity)
                mirror, self._mirror = self._mirror, None
                await mirror.close()
            await asyncio.sleep(SIZE_CHECK_SECONDS if self.fleet.fresh else 0.1)

    def _start_mirror(self) -> None:
        self._mirror = MirrorReader(self._redis, self._namespace, trusts=self._trusts)
        self._mirror.start()
