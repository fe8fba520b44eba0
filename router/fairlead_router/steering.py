"""PrefixAware: the worker that the index expects to answer soonest. Without the index: by the router's own picture, and says so."""

import asyncio
import logging
from collections.abc import Sequence

from fairlead_index.errors import IndexUnavailable
from fairlead_index.groups import GroupedReader
from fairlead_index.reader import IndexReader
from fairlead_router.metrics import Metrics
from fairlead_router.policies import Choice, Tried, Wanted, by_affinity
from fairlead_router.workers import WorkerTable

logger = logging.getLogger(__name__)

RETURN_SECONDS = 1.0
"""How often an index that was away is asked whether it is back: a router without requests must not go on calling it away."""


class PrefixAware:
    """Match, score and reserve in one round trip to the index."""

    def __init__(self, table: WorkerTable, reader: IndexReader | GroupedReader | None, metrics: Metrics) -> None:
        self._table, self._reader, self._metrics = table, reader, metrics
        self._away = False
        self.index_reason = ""
        """Why it is unavailable, in words for people."""
        self._releases: set[asyncio.Task[None]] = set()
        self._returning: asyncio.Task[None] | None = None

    @property
    def index(self) -> str:
        """For people: `off`, `ok` or `unavailable`."""
        if self._reader is None:
            return "off"
        return "unavailable" if self._away else "ok"

    async def choose(self, wanted: Wanted, tried: Tried) -> Choice | None:
        if self._reader is not None and (choice := await self._ask_index(self._reader, wanted, tried)):
            return choice
        workers = self._table.usable(tried)
        return Choice(by_affinity(wanted, workers)) if workers else None

    async def _ask_index(self, reader: IndexReader | GroupedReader, wanted: Wanted, tried: Tried) -> Choice | None:
        excluded = self._table.unusable_addresses() | {address for address, _ in tried}
        try:
            route = await reader.route(wanted.hashes, wanted.prompt_tokens, exclude=excluded)
        except IndexUnavailable as error:
            self._metrics.index_unavailable.inc()
            self._say(away=True, why=str(error))
            return None
        self._say(away=False)
        for candidate in route.candidates[:1]:
            worker = self._table.adopt(candidate.address)
            if worker is not None and worker.ready:  # else it went while the index was being asked
                return Choice(worker, candidate.cached_tokens, route.reservation)
        if route.candidates:
            self._release(reader, route.reservation)
        return None

    async def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Tokens of a prompt that each worker holds. Raises IndexUnavailable."""
        if self._reader is None:
            raise IndexUnavailable("this router was given no index (--redis-url)")
        return await self._reader.match(hashes)

    def release(self, choice: Choice) -> None:
        if self._reader is not None and choice.reservation is not None and not self._away:
            self._release(self._reader, choice.reservation)

    def _release(self, reader: IndexReader | GroupedReader, reservation: bytes) -> None:
        task = asyncio.create_task(self._give_up(reader, reservation))  # the client does not wait for Redis
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _give_up(self, reader: IndexReader | GroupedReader, reservation: bytes) -> None:
        try:
            await reader.release(reservation)
        except IndexUnavailable as error:
            self._say(away=True, why=str(error))  # the reservation decays by itself

    def _say(self, away: bool, why: str = "") -> None:
        """One line and one gauge for each transition, not for each request."""
        if away == self._away:
            return
        self._away = away
        self.index_reason = why
        self._metrics.index_up.set(0 if away else 1)
        if away:
            logger.warning("the index is unavailable, routing by local load and rendezvous: %s", why)
            if self._returning is None or self._returning.done():
                self._returning = asyncio.create_task(self._await_return())
        else:
            logger.info("the index answers again")

    async def _await_return(self) -> None:
        while self._away and self._reader is not None:
            await asyncio.sleep(RETURN_SECONDS)
            try:
                await self._reader.match(())
            except IndexUnavailable:
                continue
            self._say(away=False)

    async def close(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)
        if self._reader is not None:
            await self._reader.close()
