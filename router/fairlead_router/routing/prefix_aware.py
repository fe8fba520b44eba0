"""PrefixAware: the worker with the earliest expected first token by the prefix index, with a local fallback."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

from fairlead_index.groups import GroupedReader, create_reader
from fairlead_index.reader import IndexReader, IndexUnavailable, Route
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import LogLimit
from fairlead_router.config import IndexMode
from fairlead_router.fleet.trust import Trust
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.routing.local_fallback import HomeOf, choose_from_table, choose_soonest
from fairlead_router.routing.mirror_routing import AUTO_BLOCKS, MirrorRouting
from fairlead_router.routing.policies import Choice, RoutingRequest, Tried
from fairlead_router.routing.prediction_audit import PredictionAudit
from fairlead_router.routing.ranking import Ranking, rank
from fairlead_router.routing.unindexed_workers import UnindexedWorkers
from fairlead_router.supervision import supervise

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""Interval of a probe that Redis answers. It keeps the reported state of the index true in a router without requests."""
WATCH_SECONDS = 0.25
"""Interval of reading the mirror's own state of Redis."""


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Location of the index, and how it is read."""

    redis: RedisAccess
    namespace: str
    mode: IndexMode = "auto"
    groups: int = 1
    routers: int = 1
    """Routers of the service."""


class PrefixAware:
    """Policy by the prefix index.

    With `mirror` it uses this router's copy of the index. With `remote`, and until there is a copy, one round trip to Redis matches,
    scores and reserves.
    """

    def __init__(
        self,
        table: WorkerTable,
        index: IndexConfig | None,
        metrics: Metrics,
        refresh_discovery: Callable[[], None] = lambda: None,
        keep_candidates: bool = False,
    ) -> None:
        """`refresh_discovery`: requests an early discovery query. `keep_candidates`: as in `MirrorRouting`."""
        self._table, self._metrics = table, metrics
        self.trust = Trust(table, metrics.ignored_records, refresh_discovery)
        self._reader = create_reader(index.redis, index.namespace, index.groups, self.trust) if index is not None else None
        self._mirror: MirrorRouting | None = None
        if index is not None and index.mode == "mirror" and index.groups > 1:
            logger.warning("--index-mode mirror supports one group, and --index-groups is %d: routing through Redis instead", index.groups)
        if index is not None and index.mode != "remote" and index.groups == 1:
            max_blocks = None if index.mode == "mirror" else AUTO_BLOCKS
            self._mirror = MirrorRouting(
                table, index.redis, index.namespace, max_blocks, metrics.task_failures, self.trust, index.routers == 1, keep_candidates
            )
        fleet = self._mirror.fleet if self._mirror is not None else None
        self._unindexed = UnindexedWorkers(table, self._reader, fleet) if self._reader is not None else None
        self._audit = PredictionAudit(metrics, self._held, self._reader.recall) if self._reader is not None else None
        self._is_unavailable = False
        self._log_limit, self._is_logged = LogLimit(), False
        self.index_reason = ""
        """Why the index is unavailable, in plain text."""
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._mirror is not None:
            self._mirror.start()
        if (reader := self._reader) is not None:
            self._watching = supervise("index watch", lambda: self._watch(reader), self._metrics.task_failures)

    @property
    def index(self) -> str:
        """State of the index: `off`, `ok` or `unavailable`."""
        if self._reader is None:
            return "off"
        return "unavailable" if self._is_unavailable else "ok"

    @property
    def read_mode(self) -> str:
        """How the index is read now: `mirror`, `remote`, or empty without an index."""
        if self._reader is None:
            return ""
        return "mirror" if self._mirror is not None and self._mirror.is_ready else "remote"

    async def choose(self, request: RoutingRequest, tried: Tried) -> Choice | None:
        mirror = self._mirror
        if mirror is not None and mirror.is_preferred and (choice := mirror.choose(request, tried)):
            if not mirror.is_current:
                self._metrics.index_unavailable.inc()
            return choice
        if self._reader is not None and (choice := await self._choose_remotely(self._reader, request, tried)):
            return choice
        if mirror is not None and (choice := mirror.choose(request, tried)):
            return choice  # an outdated mirror is better than none
        worker = choose_from_table(request, self._table, tried)
        return Choice(worker) if worker is not None else None

    async def _choose_remotely(self, reader: IndexReader | GroupedReader, request: RoutingRequest, tried: Tried) -> Choice | None:
        excluded = self._table.unusable_addresses(request.model)
        if tried:
            excluded |= {address for address, _ in tried}
        hashes = await self._deepest_chain(reader, request) if request.other_hashes else request.hashes
        routing = asyncio.ensure_future(reader.route(hashes, request.prompt_tokens, exclude=excluded))
        try:
            route = await asyncio.shield(routing)
        except asyncio.CancelledError:  # the client disconnected; Redis may still reserve for it, so that reservation is released
            self._spawn(self._release_abandoned(reader, routing))
            raise
        except IndexUnavailable as error:
            self._metrics.index_unavailable.inc()
            self._set_unavailable(is_unavailable=reader.is_unavailable, reason=str(error))
            return None
        self._set_unavailable(is_unavailable=False)
        if not route.candidates:
            return None
        best, chosen = route.candidates[0], None
        worker = self._table.get(best.address)
        if worker is not None and worker.ready and worker.serves(request.model):  # else it became unusable during the call
            assert self._unindexed is not None  # there is a reader
            others = self._unindexed.find_sooner(request, route, excluded)
            if not others:
                return Choice(worker, best.cached_tokens, reservation=route.reservation)
            chosen = Choice(choose_soonest(request, others, self._home_function(others)))
        self._spawn(self._release_reservation(reader, route.reservation))
        return chosen

    async def _deepest_chain(self, reader: IndexReader | GroupedReader, request: RoutingRequest) -> Sequence[int]:
        """Return the block hashes of which some worker holds most tokens: Redis routes by one chain. The mirror compares all of them."""
        try:
            matches = await asyncio.gather(*(reader.match(chain) for chain in request.chains))
        except IndexUnavailable:
            return request.hashes  # `route` reports it
        return max(zip(matches, request.chains, strict=True), key=lambda each: max(each[0].values(), default=0))[1]

    def _home_function(self, others: Sequence[Worker]) -> HomeOf:
        by_address = {worker.address: worker for worker in others}

        return lambda place: self._table.home(place, by_address)

    async def rank(self, request: RoutingRequest, reader: IndexReader | GroupedReader | None = None) -> Ranking:
        """Return the workers that `choose` compares now, best first, without a reservation. `reader`: None for that of routing."""
        return await rank(request, self._table, self._mirror, reader or self._reader)

    @property
    def is_mirror_preferred(self) -> bool:
        """Whether the mirror is as good as Redis, or better."""
        return self._mirror is not None and self._mirror.is_preferred

    def predict(self, request: RoutingRequest) -> Mapping[str, int]:
        """Return the prompt's tokens that workers hold, by address, as the mirror has it now; empty without one."""
        return self._mirror.predict(request) if self._mirror is not None and self.is_mirror_preferred else {}

    def prefill_seconds(self, address: str) -> float:
        """Return the seconds of prefill ahead of a new prompt at the worker, as all routers together know it; 0: not known."""
        return self._mirror.fleet.prefill_seconds(address) if self._mirror is not None else 0.0

    def unique_shares(self) -> dict[str, float]:
        """Return the share of each worker's blocks that no other worker holds, by address; empty without a mirror."""
        return self._mirror.unique_shares() if self._mirror is not None else {}

    def release(self, choice: Choice) -> None:
        if not choice.reservation or self._reader is None:
            return
        if self._mirror is not None and self._mirror.release(choice.reservation):
            return
        if not self._is_unavailable:
            self._spawn(self._release_reservation(self._reader, choice.reservation))  # the client does not wait for Redis

    def record_answer(self, request: RoutingRequest, choice: Choice, cached: int) -> None:
        if self._audit is not None:
            self._audit.record_answer(request, choice, cached)

    async def _held(self, request: RoutingRequest, worker: Worker) -> int:
        if self._mirror is not None and (held := self._mirror.held(request, worker.address)) is not None:
            return held
        assert self._reader is not None
        return (await self._reader.match(request.hashes_of(worker))).get(worker.address, 0)

    async def _release_abandoned(self, reader: IndexReader | GroupedReader, routing: "asyncio.Future[Route]") -> None:
        try:
            route = await routing
        except IndexUnavailable:
            return
        if route.candidates:
            await self._release_reservation(reader, route.reservation)

    async def _release_reservation(self, reader: IndexReader | GroupedReader, reservation: bytes) -> None:
        try:
            await reader.release(reservation)
        except IndexUnavailable as error:
            self._set_unavailable(is_unavailable=reader.is_unavailable, reason=str(error))  # the reservation expires

    async def _watch(self, reader: IndexReader | GroupedReader) -> None:
        """Track whether Redis answers, also when no request queries it: a mirror serves the requests, or there are none."""
        while True:
            if self._mirror is not None and self._mirror.is_ready:
                self._set_unavailable(is_unavailable=not self._mirror.fleet.is_fresh, reason=self._mirror.fleet.reason)
                await asyncio.sleep(WATCH_SECONDS)
                continue
            try:
                await reader.match(())
            except IndexUnavailable as error:
                self._set_unavailable(is_unavailable=reader.is_unavailable, reason=str(error))
            else:
                self._set_unavailable(is_unavailable=False)
            await asyncio.sleep(PROBE_SECONDS)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_unavailable(self, is_unavailable: bool, reason: str = "") -> None:
        """Record whether the index is unavailable. Transitions are logged, at most one a minute: each reply of Redis may cause one."""
        if is_unavailable == self._is_unavailable:
            return
        self._is_unavailable = is_unavailable
        self.index_reason = reason if is_unavailable else ""
        self._metrics.index_up.set(0 if is_unavailable else 1)
        if is_unavailable and self._log_limit.may_log():
            self._is_logged = True
            fallback = "its last snapshot and the workers' own loads" if self.read_mode == "mirror" else "local load and consistent hashing"
            logger.warning("the index is unavailable, routing by %s: %s", fallback, reason)
        elif not is_unavailable and self._is_logged:
            self._is_logged = False
            logger.info("the index answers again")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._audit is not None:
            await self._audit.close()
        if self._unindexed is not None:
            await self._unindexed.close()
        if self._mirror is not None:
            await self._mirror.close()
        if self._reader is not None:
            await self._reader.close()
