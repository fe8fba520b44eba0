"""Fairlead's own routing: the product's `Chooser` on modelled pods, with Redis, during an outage of Redis, or without an index."""

import math
import pickle
import random
from collections.abc import Collection, Sequence

from fairlead.simulate.fleet import Fleet, InflightRequests, Placement
from fairlead.simulate.router_view import Clock, IndexLoads, RouterView
from fairlead.simulate.workloads.request import Request
from fairlead_index.mirror.prefix_table import PrefixTable
from fairlead_router.routing.chooser import Chooser, Prefixes
from fairlead_router.routing.policies import RoutingRequest

RETURN_SECONDS = 4.0
"""Delay after an outage of Redis: a reader's longest pause (2 s), and the workers' snapshots into the empty server (2 s)."""


class Fairlead:
    """PrefixAware. `away`: start and end of an outage of Redis, in seconds of the run."""

    def __init__(
        self,
        fleet: Fleet,
        inflight: InflightRequests,
        draw: random.Random,
        away: tuple[float, float] = (math.inf, math.inf),
        has_index: bool = True,
    ) -> None:
        self._fleet, self._away, self._has_index, self._clock = fleet, away, has_index, Clock()
        self.view = RouterView(fleet, inflight, draw)
        self._loads = IndexLoads(fleet, self._clock) if has_index else None
        self._chooser = Chooser(self.view.table, self._loads, clock=self._clock, draw=lambda: draw.randbytes(8))
        self._snapshot: PrefixTable | None = None

    def choose(self, request: Request, now: float, avoided: Collection[int] = ()) -> Placement:
        self._set_time(now)
        self.view.usable(now)
        blocks = self._fleet.whole_blocks(request)
        wanted, prefixes = RoutingRequest(request.prompt_tokens, blocks), self._find(blocks)
        tried = {(self._fleet.addresses[pod], self.view.workers[pod].generation) for pod in avoided}
        choice = self._chooser.choose(wanted, tried, prefixes) or self._chooser.choose(wanted, (), prefixes)
        assert choice is not None, "a pod is usable"
        return Placement(self._fleet.number_of[choice.worker.address], choice.predicted or 0, choice.reservation or b"")

    def release(self, reservation: bytes) -> None:
        """End a reservation: the request has its first token, or its pod has failed."""
        self._chooser.release(reservation)

    def prefill_seconds(self, pod: int, now: float) -> float:
        self._set_time(now)
        return self._loads.prefill_seconds(pod) if self._loads is not None else 0.0

    def _set_time(self, now: float) -> None:
        self._clock.now = now
        if self._loads is not None:
            self._loads.is_fresh = not self._away[0] <= now < self._away[1] + RETURN_SECONDS

    def _find(self, blocks: Sequence[int]) -> Prefixes:
        """Return what the router's copy of the index shows."""
        if self._loads is None:
            return Prefixes({}, "local")
        if self._loads.is_fresh:
            return Prefixes(self._fleet.table.match(blocks), "mirror")
        if self._snapshot is None:
            self._snapshot = copy_table(self._fleet.table)
        return Prefixes(self._snapshot.match(blocks), "outdated")


def copy_table(table: PrefixTable) -> PrefixTable:
    copy: PrefixTable = pickle.loads(pickle.dumps(table))  # deepcopy would share the table's bound methods
    return copy
