"""Routing by this router's mirror of the index: match and score in memory, then publish the reservation to the other routers."""

import asyncio
import logging
import os
from collections.abc import Container, Iterable, Mapping
from itertools import chain, islice
from time import monotonic

from prometheus_client import Counter

from fairlead_index.hashing import hash_bytes
from fairlead_index.mirror.prefixes import MirrorReader
from fairlead_index.mirror.workers import FleetReader
from fairlead_index.reader import IndexUnavailable, Trust
from fairlead_index.redis.access import RedisAccess
from fairlead_index.score import CONSIDERED, HOLDERS, SMALL_FLEET, ScoredWorker, StartEstimate, rank_candidates
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.local_fallback import BLOCK_TOKENS, score_locally
from fairlead_router.routing.policies import Choice, RoutingRequest, Tried
from fairlead_router.routing.prompts_in_flight import PromptsInFlight, prefer_computing
from fairlead_router.routing.sent_prefixes import SentPrefixes, expect_at_homes
from fairlead_router.supervision import supervise

logger = logging.getLogger(__name__)

AUTO_BLOCKS = 2_000_000
"""Largest fleet that `auto` mirrors, in blocks of KV capacity. A block takes about 90 bytes if no two workers hold the same one."""
SIZE_CHECK_SECONDS = 1.0
ALONE_SECONDS = 60.0
"""Time without a reservation of another router after which this one counts as alone."""
MAX_UNINDEXED = 4
"""Workers of a large fleet, the soonest by this router's own view, that are considered in case the index lacks them."""


class MirrorRouting:
    """Routing by a mirror. `choose` returns None without a snapshot.

    While Redis is unavailable, the last snapshot serves, with the prompts that this router sent since.
    """

    def __init__(
        self,
        table: WorkerTable,
        redis: RedisAccess,
        namespace: str,
        max_blocks: int | None,
        failures: Counter,
        trusts: Trust,
        is_alone: bool = True,
        keep_candidates: bool = False,
    ) -> None:
        """`max_blocks`: a larger fleet is not mirrored; None: no limit. `failures`: counter of task failures, by name. `is_alone`: there is
        no other router, so this one knows all prompts in flight. Several, which all know a part of them, would gather a burst at one home.
        `keep_candidates`: choices have the workers that were compared."""
        self._table, self._redis, self._namespace, self._max_blocks = table, redis, namespace, max_blocks
        self._failures, self._trusts, self._keep_candidates = failures, trusts, keep_candidates
        self.fleet = FleetReader(redis, namespace, trusts=trusts)
        self._mirror: MirrorReader | None = None
        self._sent = SentPrefixes()
        self._in_flight = PromptsInFlight() if is_alone else None
        self._size_check: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._table.on_incarnation = self._recheck_trust
        self.fleet.start()
        if (max_blocks := self._max_blocks) is None:
            self._start_mirror()
        else:
            self._size_check = supervise("mirror size", lambda: self._check_size(max_blocks), self._failures)

    @property
    def is_ready(self) -> bool:
        """Whether the mirror has a snapshot."""
        return self._mirror is not None and self._mirror.stats.snapshots > 0

    @property
    def is_preferred(self) -> bool:
        """Whether the mirror is at least as good as Redis: it is current, or Redis does not answer."""
        return self.is_ready and (self.is_current or not self.fleet.is_fresh)

    @property
    def is_current(self) -> bool:
        """Whether the mirror follows the index's log without a gap."""
        return self.fleet.is_fresh and self._mirror is not None and self._mirror.stats.following

    def choose(self, request: RoutingRequest, tried: Tried) -> Choice | None:
        starts, computing = self._rank(request, tried, CONSIDERED if self._keep_candidates else 1)
        if not starts:
            return None
        best = starts[0]
        worker = self._table.get(best.address)
        assert worker is not None  # nothing was awaited since it was listed
        kept = starts if self._keep_candidates else ()
        if self.is_current:
            self._sent.clear()
            shown = best.cached if best.address not in computing else (self.held(request, best.address) or 0)
            reservation = self.fleet.reserve(best.address, best.cost)
            if self._in_flight is not None:
                rest = request.hashes_of(worker)[shown // self._block_tokens(worker.address) :]
                self._in_flight.add(reservation, worker.address, rest, monotonic())
            return Choice(worker, best.cached, max(0, best.cached - shown), reservation=reservation, candidates=kept)
        cached = min(best.cached, self.predict(request).get(best.address, 0))  # what is only expected at a home may not be there
        self._sent.add(worker, self._block_tokens(worker.address), request.hashes_of(worker))
        reservation = self.fleet.reserve(best.address, request.prompt_tokens - cached)
        return Choice(worker, cached, is_outdated=True, reservation=reservation, candidates=kept)

    def release(self, reservation: bytes) -> bool:
        """End a reservation: the answer has begun, or the attempt has failed. Return False if Redis made it."""
        if self._in_flight is not None:
            self._in_flight.remove(reservation)
        return self.fleet.release(reservation)

    def rank(self, request: RoutingRequest, tried: Tried, wanted: int) -> list[StartEstimate]:
        """Return the `wanted` best workers, best first; none without a snapshot."""
        return self._rank(request, tried, wanted)[0]

    def _rank(self, request: RoutingRequest, tried: Tried, wanted: int) -> tuple[list[StartEstimate], Mapping[str, int]]:
        """Return `rank`, and `_computing` of the prompt."""
        mirror, fresh, table = self._mirror, self.fleet.is_fresh, self._table
        if mirror is None:
            return [], {}
        allowed = table.usable(tried, request.model)
        try:
            if len(allowed) <= SMALL_FLEET:
                held = self._complete(_match(mirror, request), request, tried)
                computing = self._computing(held, request)
                held |= computing
                cold = request.hashes and not any(worker.address in held for worker in allowed)
                homes = table.homes(request.hashes[0], 2, table.eligible_addresses(tried, request.model)) if cold else []
                workers: Iterable[Worker] = allowed
            else:
                held, computing, homes, workers = self._candidates(mirror, request, tried, fresh)
        except IndexUnavailable:
            return [], {}
        scored = [self._score(worker, held.get(worker.address, 0), fresh) for worker in workers]
        asked = len(scored) if computing else wanted
        starts = rank_candidates(scored, hash_bytes(request.hashes), request.prompt_tokens, os.urandom(8), asked, homes)
        return prefer_computing(starts, computing)[:wanted], computing

    def _candidates(
        self, mirror: MirrorReader, request: RoutingRequest, tried: Tried, fresh: bool
    ) -> tuple[dict[str, int], dict[str, int], list[str], Iterable[Worker]]:
        """Return the candidates of a large fleet as route.lua selects them: cached tokens by address, `_computing`, the prompt's homes, the
        workers.

        Candidates are the homes of a prompt that no worker holds, the deepest holders, then the soonest workers, CONSIDERED in all. Workers
        missing from the index are included if they are among the soonest by this router's own view.
        """
        table, model = self._table, request.model

        allowed = table.eligible_addresses(tried, model)
        soonest_here = [worker.address for worker in table.soonest(MAX_UNINDEXED if fresh else CONSIDERED, tried, model)]
        soonest = [address for address in soonest_here if not fresh or address not in self.fleet.workers]
        soonest += islice((address for address in self.fleet.soonest if address in allowed), CONSIDERED - len(soonest)) if fresh else ()
        held = self._complete(_deepest(mirror, request, allowed, soonest), request, tried)
        computing = {address: tokens for address, tokens in self._computing(held, request).items() if address in allowed}
        if computing:
            held = dict(sorted((held | computing).items(), key=lambda each: -each[1]))
        homes = table.homes(request.hashes[0], 2, allowed) if request.hashes and not held else []
        found: dict[str, Worker] = {}
        for address in chain(homes, islice(held, HOLDERS), soonest):
            if (worker := table.get(address)) is not None and len(found) < CONSIDERED:
                found[address] = worker
        return held, computing, homes, found.values()

    def predict(self, request: RoutingRequest) -> dict[str, int]:
        """Return the prompt's tokens that workers hold, by address; in a large fleet those of the deepest holders."""
        if self._mirror is None:
            return {}
        try:
            if len(self._table.usable((), request.model)) <= SMALL_FLEET:
                held = _match(self._mirror, request)
            else:
                held = _deepest(self._mirror, request, self._table.eligible_addresses((), request.model))
            return held if self.is_current else self._add_sent(held, request)
        except IndexUnavailable:
            return {}

    def unique_shares(self) -> dict[str, float]:
        """Return the share of each worker's blocks that no other worker holds, by address; empty before the first snapshot."""
        return self._mirror.unique_shares() if self._mirror is not None else {}

    def held(self, request: RoutingRequest, address: str) -> int | None:
        """Return the prompt's tokens that the worker holds by the mirror; None without a mirror."""
        if self._mirror is None:
            return None
        try:
            return self._mirror.match(request.hashes_of(self._table.get(address))).get(address, 0)
        except IndexUnavailable:
            return None

    async def close(self) -> None:
        if self._size_check is not None:
            self._size_check.cancel()
        await self.fleet.close()
        if self._mirror is not None:
            await self._mirror.close()

    def _complete(self, held: dict[str, int], request: RoutingRequest, tried: Tried) -> dict[str, int]:
        """Return the tokens by address, the most first, with what an outdated mirror lacks."""
        if self.is_current or not request.hashes:
            return held
        known, allowed = self._add_sent(held, request), self._table.eligible_addresses(tried, request.model)

        def home_of(place: int) -> Worker | None:
            return self._table.home(place, allowed)

        expected = expect_at_homes(known, request.hashes, lambda worker: self._block_tokens(worker.address), home_of)
        return dict(sorted(expected.items(), key=lambda each: -each[1]))

    def _add_sent(self, held: dict[str, int], request: RoutingRequest) -> dict[str, int]:
        for hashes in request.chains:
            held = self._sent.add_to(held, hashes)
        return held

    def _computing(self, held: Mapping[str, int], request: RoutingRequest) -> dict[str, int]:
        """Return the tokens by address that workers will hold beyond `held`, because this router has sent them a prompt with these."""
        found: dict[str, int] = {}
        if self._in_flight is not None and monotonic() - self.fleet.others_changed_at > ALONE_SECONDS:
            for hashes in request.chains:
                found |= self._in_flight.extend(held, hashes, self._block_tokens, monotonic())
        return found

    def _block_tokens(self, address: str) -> int:
        """Return a worker's block size in tokens, or a usual one if the mirror does not know it."""
        return (self._mirror.block_tokens_of(address) if self._mirror is not None else 0) or BLOCK_TOKENS

    def _score(self, worker: Worker, held: int, fresh: bool) -> ScoredWorker:
        """Return the score input: the index's load and all routers' reservations.

        While Redis is unavailable, use the worker's own load report and this router's reservations.
        """
        scored = self.fleet.workers.get(worker.address)
        if scored is not None and fresh:
            self.fleet.refresh(scored)
            backlog = max(0.0, scored.backlog - scored.rate * scored.load_age)
            scored.reserved_tokens = max(
                scored.reserved_tokens, worker.pending_tokens - backlog
            )  # no load report covers this router's pending tokens yet
        else:
            scored = score_locally(worker, self._block_tokens(worker.address))
        scored.depth = held // scored.block_tokens
        return scored

    def _recheck_trust(self) -> None:
        self.fleet.read_soon()
        if self._mirror is not None:
            self._mirror.check_soon()

    async def _check_size(self, max_blocks: int) -> None:
        """Mirror while the fleet is small enough, and stop when it exceeds the limit by a quarter."""
        while True:
            if self._mirror is None and self.fleet.is_fresh and self.fleet.capacity <= max_blocks:
                self._start_mirror()
            elif self._mirror is not None and self.fleet.capacity > 1.25 * max_blocks:
                logger.info(
                    "the fleet has a capacity of %d blocks, too many for a mirror: routing through Redis instead", self.fleet.capacity
                )
                mirror, self._mirror = self._mirror, None
                await mirror.close()
            await asyncio.sleep(SIZE_CHECK_SECONDS if self.fleet.is_fresh else 0.1)

    def _start_mirror(self) -> None:
        self._mirror = MirrorReader(self._redis, self._namespace, trusts=self._trusts)
        self._mirror.start()


def _match(mirror: MirrorReader, request: RoutingRequest) -> dict[str, int]:
    """Return the prompt's tokens that workers hold, by address, each in its own format."""
    held = mirror.match(request.hashes)
    for hashes in request.other_hashes.values():
        held |= mirror.match(hashes)
    return held


def _deepest(mirror: MirrorReader, request: RoutingRequest, allowed: Container[str], included: Iterable[str] = ()) -> dict[str, int]:
    """Return `_match` of a large fleet: the deepest holders and the `included` workers, the most tokens first."""
    held = mirror.deepest(request.hashes, CONSIDERED, allowed, included)
    if not request.other_hashes:
        return held
    for hashes in request.other_hashes.values():
        held |= mirror.deepest(hashes, CONSIDERED, allowed, included)
    return dict(sorted(held.items(), key=lambda each: -each[1]))
