"""Usable workers that the index does not name: it was emptied and they join again, it is another release's, or they cannot reach it.

The few that it does name must not get everybody's requests meanwhile.
"""

import asyncio
from collections.abc import Collection
from time import monotonic

from fairlead_index.groups import GroupedReader
from fairlead_index.mirror.workers import FleetReader
from fairlead_index.reader import MAX_CANDIDATES, IndexReader, IndexUnavailable, Route
from fairlead_index.score import CONSIDERED
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.local_fallback import soonest_start
from fairlead_router.routing.policies import Wanted

LOOK_SECONDS = 1.0
"""Between two questions who is named, where neither an answer's candidates nor a `FleetReader` tell."""


class Unnamed:
    """An answer with fewer candidates than it could have names everybody whom the index knows. Of a larger fleet somebody has to keep
    count: the fleet's reader where there is one, else a look of our own, once a second while requests come. Nobody waits for it."""

    def __init__(self, table: WorkerTable, reader: IndexReader | GroupedReader, fleet: FleetReader | None) -> None:
        self._table, self._reader, self._fleet = table, reader, fleet
        self._missing: frozenset[str] = frozenset()
        self._counted = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    def sooner(self, wanted: Wanted, route: Route, excluded: Collection[str]) -> list[Worker]:
        """Workers that may be chosen, that the index did not compare, and the best of which starts the prompt sooner than the index's best,
        with none of it in its cache. Empty where there are none. `excluded`: the addresses that the index was told to leave out."""
        absent = self._absent(route)
        if len(absent) > CONSIDERED:  # the soonest of them: a request does not go through a large fleet
            absent = [worker.address for worker in self._table.soonest(CONSIDERED) if worker.address in absent]
        known = (self._table.get(address) for address in absent if address not in excluded)
        others = [worker for worker in known if worker is not None and worker.usable and worker.serves(wanted.model)]
        if not others:
            return []
        start, best = soonest_start(wanted, others), route.candidates[0]
        return others if (not start.fits, start.seconds) < (not best.fits, best.expected_seconds) else []

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def _absent(self, route: Route) -> Collection[str]:
        """Addresses that the table has and the index does not name; of a large fleet some."""
        if len(route.candidates) < MAX_CANDIDATES:
            self._counted = float("-inf")  # should the next answer be full, this was no count for it
            named = {candidate.address for candidate in route.candidates}
            return [worker.address for worker in self._table.soonest(CONSIDERED) if worker.address not in named]
        if self._fleet is not None and self._fleet.is_fresh:
            if self._counted != self._fleet.last_read_at:
                self._count(self._fleet.workers, self._fleet.last_read_at)
        elif monotonic() - self._counted > LOOK_SECONDS and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look(), name="who the index names")
        joined = [candidate.address for candidate in route.candidates if candidate.address in self._missing]  # since
        return self._missing.difference(joined) if joined else self._missing

    async def _look(self) -> None:
        try:
            named = {state.address for state in await self._reader.workers()}
        except IndexUnavailable:
            return  # the last count stays, and requests notice for themselves
        self._count(named, monotonic())

    def _count(self, named: Collection[str], at: float) -> None:
        self._counted = at
        self._missing = frozenset(worker.address for worker in self._table if worker.address not in named)
