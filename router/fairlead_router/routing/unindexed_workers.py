"""Usable workers that are missing from the index.

The index was emptied and they have yet to join again, it belongs to another release, or they cannot reach it. Meanwhile the few workers in
the index must not get all requests.
"""

import asyncio
from collections.abc import Collection
from time import monotonic

from fairlead_index.groups import GroupedReader
from fairlead_index.mirror.workers import FleetReader
from fairlead_index.reader import MAX_CANDIDATES, IndexReader, IndexUnavailable, Route
from fairlead_index.score import CONSIDERED
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.local_fallback import earliest_start
from fairlead_router.routing.policies import RoutingRequest

REFRESH_SECONDS = 1.0
"""Interval of listing the index's workers, where neither the candidates of an answer nor a `FleetReader` show them."""


class UnindexedWorkers:
    """Set of workers that are missing from the index.

    An answer with fewer than MAX_CANDIDATES candidates lists all workers of the index. For a larger fleet the list comes from the fleet's
    reader if there is one, else from a query once a second while requests come. No request waits for it.
    """

    def __init__(self, table: WorkerTable, reader: IndexReader | GroupedReader, fleet: FleetReader | None) -> None:
        self._table, self._reader, self._fleet = table, reader, fleet
        self._missing: frozenset[str] = frozenset()
        self._counted_at = float("-inf")
        self._listing: asyncio.Task[None] | None = None

    def find_sooner(self, request: RoutingRequest, route: Route, excluded: Collection[str]) -> list[Worker]:
        """Return eligible workers that the index did not score, if the best of them starts the prompt sooner than the index's best.

        They are assumed to have no cached tokens of the prompt. `excluded`: addresses that the index had to leave out.
        """
        missing = self._unindexed(route)
        if len(missing) > CONSIDERED:  # only the soonest: a request must not iterate over a large fleet
            missing = [worker.address for worker in self._table.soonest(CONSIDERED) if worker.address in missing]
        known = (self._table.get(address) for address in missing if address not in excluded)
        others = [worker for worker in known if worker is not None and worker.usable and worker.serves(request.model)]
        if not others:
            return []
        start, best = earliest_start(request, others), route.candidates[0]
        return others if (not start.fits, start.seconds) < (not best.fits, best.expected_seconds) else []

    async def close(self) -> None:
        if self._listing is not None:
            self._listing.cancel()
            await asyncio.gather(self._listing, return_exceptions=True)

    def _unindexed(self, route: Route) -> Collection[str]:
        """Return addresses of the table that are missing from the index; of a large fleet, some of them."""
        if len(route.candidates) < MAX_CANDIDATES:
            self._counted_at = float("-inf")  # the next answer may be full, and this one does not cover it
            indexed = {candidate.address for candidate in route.candidates}
            return [worker.address for worker in self._table.soonest(CONSIDERED) if worker.address not in indexed]
        if self._fleet is not None and self._fleet.is_fresh:
            if self._counted_at != self._fleet.last_read_at:
                self._set_indexed(self._fleet.workers, self._fleet.last_read_at)
        elif monotonic() - self._counted_at > REFRESH_SECONDS and (self._listing is None or self._listing.done()):
            self._listing = asyncio.create_task(self._refresh(), name="list indexed workers")
        since_joined = [candidate.address for candidate in route.candidates if candidate.address in self._missing]
        return self._missing.difference(since_joined) if since_joined else self._missing

    async def _refresh(self) -> None:
        try:
            indexed = {state.address for state in await self._reader.workers()}
        except IndexUnavailable:
            return  # the last list stays in use; requests notice the outage themselves
        self._set_indexed(indexed, monotonic())

    def _set_indexed(self, indexed: Collection[str], at: float) -> None:
        self._counted_at = at
        self._missing = frozenset(worker.address for worker in self._table if worker.address not in indexed)
