"""PrefixAware: the worker that the index expects to answer soonest. Without the index: by the router's own picture, and says so."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from fairlead_index.groups import GroupedReader, index_reader
from fairlead_index.reader import IndexReader, IndexUnavailable, Route
from fairlead_index.redis.access import RedisAccess
from fairlead_router.config import IndexMode
from fairlead_router.fleet.trust import Trust
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.routing.local_fallback import HomeOf, soonest_alone, soonest_of
from fairlead_router.routing.mirror_routing import AUTO_BLOCKS, Mirrored
from fairlead_router.routing.policies import Choice, Tried, Wanted
from fairlead_router.routing.prediction_audit import Audit
from fairlead_router.routing.unindexed_workers import Unnamed
from fairlead_router.supervision import keep

logger = logging.getLogger(__name__)

ASK_SECONDS = 1.0
"""How often Redis is asked whether it answers, besides by requests: what a router without any says of the index must be true as well."""
WATCH_SECONDS = 0.25
"""How often a copy's own look at Redis is looked at."""


@dataclass(frozen=True, slots=True)
class IndexAt:
    """Which index, and how it is read."""

    redis: RedisAccess
    namespace: str
    mode: IndexMode = "auto"
    groups: int = 1


class PrefixAware:
    """`mirror`: by this router's copy of the index. `remote`, and until there is a copy: match, score and reserve in one round trip."""

    def __init__(self, table: WorkerTable, index: IndexAt | None, metrics: Metrics, hurry: Callable[[], None] = lambda: None) -> None:
        """`hurry`: has discovery asked again soon."""
        self._table, self._metrics = table, metrics
        self.trust = Trust(table, metrics.ignored_records, hurry)
        self._reader = index_reader(index.redis, index.namespace, index.groups, self.trust) if index is not None else None
        self._mirrored: Mirrored | None = None
        if index is not None and index.mode == "mirror" and index.groups > 1:
            logger.warning("--index-mode mirror follows one group, and --index-groups is %d: Redis is asked instead", index.groups)
        if index is not None and index.mode != "remote" and index.groups == 1:
            most = None if index.mode == "mirror" else AUTO_BLOCKS
            self._mirrored = Mirrored(table, index.redis, index.namespace, most, metrics.task_failures, self.trust)
        fleet = self._mirrored.fleet if self._mirrored is not None else None
        self._unnamed = Unnamed(table, self._reader, fleet) if self._reader is not None else None
        self._audit = Audit(metrics, self._held, self._reader.recall) if self._reader is not None else None
        self._away = False
        self.index_reason = ""
        """Why it is unavailable, in words for people."""
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._mirrored is not None:
            self._mirrored.start()
        if (reader := self._reader) is not None:
            self._watching = keep("index watch", lambda: self._watch(reader), self._metrics.task_failures)

    @property
    def index(self) -> str:
        """For people: `off`, `ok` or `unavailable`."""
        if self._reader is None:
            return "off"
        return "unavailable" if self._away else "ok"

    @property
    def reading(self) -> str:
        """How the index is read now: `mirror`, `remote`, or empty."""
        if self._reader is None:
            return ""
        return "mirror" if self._mirrored is not None and self._mirrored.ready else "remote"

    async def choose(self, wanted: Wanted, tried: Tried) -> Choice | None:
        mirrored = self._mirrored
        if mirrored is not None and mirrored.preferred and (choice := mirrored.choose(wanted, tried)):
            if not mirrored.current:
                self._metrics.index_unavailable.inc()
            return choice
        if self._reader is not None and (choice := await self._ask_index(self._reader, wanted, tried)):
            return choice
        if mirrored is not None and (choice := mirrored.choose(wanted, tried)):
            return choice  # an old picture is better than none
        worker = soonest_of(wanted, self._table, tried)
        return Choice(worker) if worker is not None else None

    async def _ask_index(self, reader: IndexReader | GroupedReader, wanted: Wanted, tried: Tried) -> Choice | None:
        excluded = self._table.unusable_addresses(wanted.model)
        if tried:
            excluded |= {address for address, _ in tried}
        asking = asyncio.ensure_future(reader.route(wanted.hashes, wanted.prompt_tokens, exclude=excluded))
        try:
            route = await asyncio.shield(asking)
        except asyncio.CancelledError:  # the client has gone; what Redis reserves for it all the same is given back
            self._spawn(self._unwanted(reader, asking))
            raise
        except IndexUnavailable as error:
            self._metrics.index_unavailable.inc()
            self._say(away=reader.is_unavailable, why=str(error))
            return None
        self._say(away=False)
        if not route.candidates:
            return None
        best, chosen = route.candidates[0], None
        worker = self._table.get(best.address)
        if worker is not None and worker.ready and worker.serves(wanted.model):  # else it went while the index was being asked
            assert self._unnamed is not None  # there is a reader
            others = self._unnamed.sooner(wanted, route, excluded)
            if not others:
                return Choice(worker, best.cached_tokens, route.reservation)
            chosen = Choice(soonest_alone(wanted, others, self._home_among(others)))
        self._spawn(self._give_up(reader, route.reservation))
        return chosen

    def _home_among(self, others: Sequence[Worker]) -> HomeOf:
        by_address = {worker.address: worker for worker in others}

        return lambda place: self._table.home(place, by_address)

    async def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Tokens of a prompt that each worker holds. Raises IndexUnavailable."""
        if self._reader is None:
            raise IndexUnavailable("this router was given no index (--redis-url)")
        return await self._reader.match(hashes)

    def held_alone(self) -> dict[str, float]:
        """Of what each worker (by address) holds, the share that no other does; empty where no copy of the index is kept."""
        return self._mirrored.held_alone() if self._mirrored is not None else {}

    def release(self, choice: Choice) -> None:
        if not choice.reservation or self._reader is None:
            return
        if self._mirrored is not None and self._mirrored.fleet.release(choice.reservation):
            return
        if not self._away:
            self._spawn(self._give_up(self._reader, choice.reservation))  # the client does not wait for Redis

    def answered(self, wanted: Wanted, choice: Choice, cached: int) -> None:
        if self._audit is not None:
            self._audit.answered(wanted, choice, cached)

    async def _held(self, wanted: Wanted, worker: Worker) -> int:
        if self._mirrored is not None and (held := self._mirrored.held(wanted, worker.address)) is not None:
            return held
        assert self._reader is not None
        return (await self._reader.match(wanted.hashes)).get(worker.address, 0)

    async def _unwanted(self, reader: IndexReader | GroupedReader, asking: "asyncio.Future[Route]") -> None:
        try:
            route = await asking
        except IndexUnavailable:
            return
        if route.candidates:
            await self._give_up(reader, route.reservation)

    async def _give_up(self, reader: IndexReader | GroupedReader, reservation: bytes) -> None:
        try:
            await reader.release(reservation)
        except IndexUnavailable as error:
            self._say(away=reader.is_unavailable, why=str(error))  # the reservation decays by itself

    async def _watch(self, reader: IndexReader | GroupedReader) -> None:
        """Somebody has to notice that Redis is away, or back, where no request asks it: because a copy answers them, or there are none."""
        while True:
            if self._mirrored is not None and self._mirrored.ready:
                self._say(away=not self._mirrored.fleet.is_fresh, why="Redis does not answer")
                await asyncio.sleep(WATCH_SECONDS)
                continue
            try:
                await reader.match(())
            except IndexUnavailable as error:
                self._say(away=reader.is_unavailable, why=str(error))
            else:
                self._say(away=False)
            await asyncio.sleep(ASK_SECONDS)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _say(self, away: bool, why: str = "") -> None:
        """One line and one gauge for each transition, not for each request."""
        if away == self._away:
            return
        self._away = away
        self.index_reason = why if away else ""
        self._metrics.index_up.set(0 if away else 1)
        if away:
            by = "the last picture of it and the workers' own loads" if self.reading == "mirror" else "local load and consistent hashing"
            logger.warning("the index is unavailable, routing by %s: %s", by, why)
        else:
            logger.info("the index answers again")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._audit is not None:
            await self._audit.close()
        if self._unnamed is not None:
            await self._unnamed.close()
        if self._mirrored is not None:
            await self._mirrored.close()
        if self._reader is not None:
            await self._reader.close()
