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
from fairlead_index.score import CONSIDERED, HOLDERS, SMALL_FLEET, ScoredWorker, rank_candidates
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.local_fallback import BLOCK_TOKENS, scored_alone
from fairlead_router.routing.policies import Choice, Tried, Wanted
from fairlead_router.supervision import keep

logger = logging.getLogger(__name__)

AUTO_BLOCKS = 2_000_000
"""What `auto` mirrors at most: blocks that the workers could hold, at about 90 bytes each where no two hold the same."""
GUARD_SECONDS = 1.0
UNNAMED = 4
"""Of a large fleet's soonest workers, those looked at in case the index does not name them."""


class Mirrored:
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
        self._table.on_incarnation = self._trust_changed
        self.fleet.start()
        if (most := self._most) is None:
            self._begin()
        else:
            self._guarding = keep("mirror guard", lambda: self._guard(most), self._failures)

    @property
    def ready(self) -> bool:
        """Whether there is a picture to choose by."""
        return self._mirror is not None and self._mirror.stats.snapshots > 0

    @property
    def preferred(self) -> bool:
        """Whether Redis has nothing better to say: the picture is of now, or nobody answers there."""
        return self.ready and (self.current or not self.fleet.is_fresh)

    @property
    def current(self) -> bool:
        """Whether the picture is of now."""
        return self.fleet.is_fresh and self._mirror is not None and self._mirror.stats.following

    def choose(self, wanted: Wanted, tried: Tried) -> Choice | None:
        mirror, fresh, table = self._mirror, self.fleet.is_fresh, self._table
        if mirror is None:
            return None
        allowed = table.usable(tried, wanted.model)
        try:
            if len(allowed) <= SMALL_FLEET:
                held = mirror.match(wanted.hashes)
                cold = wanted.hashes and not any(worker.address in held for worker in allowed)
                homes = table.homes(wanted.hashes[0], 2, table.may(tried, wanted.model)) if cold else []
                workers: Iterable[Worker] = allowed
            else:
                held, homes, workers = self._considered(mirror, wanted, tried, fresh)
        except IndexUnavailable:
            return None
        scored = [self._scored(worker, held.get(worker.address, 0), fresh) for worker in workers]
        if not scored:
            return None
        best = rank_candidates(scored, hash_bytes(wanted.hashes), wanted.prompt_tokens, os.urandom(8), 1, homes)[0]
        worker = table.get(best.address)
        assert worker is not None  # nothing was awaited since it was listed
        return Choice(worker, best.cached, self.fleet.reserve(best.address, best.cost))

    def _considered(
        self, mirror: MirrorReader, wanted: Wanted, tried: Tried, fresh: bool
    ) -> tuple[dict[str, int], list[str], Iterable[Worker]]:
        """Of a large fleet what each of some workers holds, the prompt's homes, and those workers: as route.lua chooses whom it scores.

        The homes of a prompt that nobody holds, the deepest holders, then the soonest, CONSIDERED in all; and workers that the index does
        not name, as far as they are among the soonest by this router's own picture.
        """
        table, model = self._table, wanted.model

        may = table.may(tried, model)
        own = [worker.address for worker in table.soonest(UNNAMED if fresh else CONSIDERED, tried, model)]
        soonest = [address for address in own if not fresh or address not in self.fleet.workers]
        soonest += islice((address for address in self.fleet.soonest if address in may), CONSIDERED - len(soonest)) if fresh else ()
        held = mirror.deepest(wanted.hashes, CONSIDERED, may, soonest)
        homes = table.homes(wanted.hashes[0], 2, may) if wanted.hashes and not held else []
        found: dict[str, Worker] = {}
        for address in chain(homes, islice(held, HOLDERS), soonest):
            if (worker := table.get(address)) is not None and len(found) < CONSIDERED:
                found[address] = worker
        return held, homes, found.values()

    def held_alone(self) -> dict[str, float]:
        """Of what each worker (by address) holds, the share that no other does; empty before there is a picture."""
        return self._mirror.unique_shares() if self._mirror is not None else {}

    def held(self, wanted: Wanted, address: str) -> int | None:
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

    def _scored(self, worker: Worker, held: int, fresh: bool) -> ScoredWorker:
        """By the index's load and everybody's reservations; while Redis is away, by what the worker says of itself, and ours."""
        scored = self.fleet.workers.get(worker.address)
        if scored is not None and fresh:
            self.fleet.refresh(scored)
            backlog = max(0.0, scored.backlog - scored.rate * scored.load_age)
            ours = worker.pending_tokens - backlog  # no load reports these as done yet
            scored.reserved_tokens = max(scored.reserved_tokens, ours)
        else:
            known = self._mirror.block_tokens_of(worker.address) if self._mirror is not None else 0
            block_tokens = known or BLOCK_TOKENS
            scored = scored_alone(worker, block_tokens)
        scored.depth = held // scored.block_tokens
        return scored

    def _trust_changed(self) -> None:
        self.fleet.read_soon()
        if self._mirror is not None:
            self._mirror.check_soon()

    async def _guard(self, most: int) -> None:
        """Mirror while the fleet is small enough, and stop when it has clearly outgrown that."""
        while True:
            if self._mirror is None and self.fleet.is_fresh and self.fleet.capacity <= most:
                self._begin()
            elif self._mirror is not None and self.fleet.capacity > 1.25 * most:
                logger.info("the fleet could hold %d blocks, more than are mirrored: Redis is asked instead", self.fleet.capacity)
                mirror, self._mirror = self._mirror, None
                await mirror.close()
            await asyncio.sleep(GUARD_SECONDS if self.fleet.is_fresh else 0.1)

    def _begin(self) -> None:
        self._mirror = MirrorReader(self._redis, self._namespace, trusts=self._trusts)
        self._mirror.start()
