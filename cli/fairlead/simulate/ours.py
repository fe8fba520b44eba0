"""Fairlead's own routing: the product's `Chooser` on modelled pods, with Redis, during an outage of Redis, or without an index."""

import pickle
import random
from collections.abc import Mapping

from fairlead.simulate.fleet import Fleet, InflightRequests, Placement
from fairlead.simulate.router_view import NEVER, IndexLoads, RouterView
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request
from fairlead_index.mirror.prefix_table import PrefixTable
from fairlead_router.routing.chooser import Chooser, Prefixes
from fairlead_router.routing.policies import RoutingRequest, Tried


def to_routing_request(request: Request) -> RoutingRequest:
    """Return a request as the product's routers know it: without the hash of a partial last block."""
    return RoutingRequest(request.prompt_tokens, request.blocks[: request.prompt_tokens // BLOCK_TOKENS])


class Fairlead:
    """PrefixAware. `away`: start and end of an outage of Redis, in seconds of the run."""

    def __init__(
        self,
        fleet: Fleet,
        inflight: InflightRequests,
        draw: random.Random,
        away: tuple[float, float] = NEVER,
        has_index: bool = True,
    ) -> None:
        self._fleet = fleet
        self.view = RouterView(fleet, inflight, draw.random())
        self._loads = IndexLoads(fleet, away) if has_index else None
        self._chooser = Chooser(self.view.table, self._loads, clock=fleet.clock, draw=lambda: draw.randbytes(8))
        self._snapshot: PrefixTable | None = None

    def choose(self, request: Request, avoided: Tried = ()) -> Placement:
        self.view.update()
        wanted = to_routing_request(request)
        prefixes = self._find(wanted)
        choice = self._chooser.choose(wanted, avoided, prefixes) or self._chooser.choose(wanted, (), prefixes)
        assert choice is not None, "a pod is usable"
        return Placement(self._fleet.number_of[choice.worker.address], choice.predicted or 0, choice.reservation or b"")

    def predict(self, wanted: RoutingRequest) -> Mapping[str, int]:
        """Return the prompt's tokens that workers hold, by address, as far as the router knows; empty without an index."""
        return self._chooser.known(wanted, self._find(wanted)) if self._loads is not None else {}

    def release(self, reservation: bytes) -> None:
        """End a reservation: the request has its first token, or its pod has failed."""
        self._chooser.release(reservation)

    def tokens_ahead(self, address: str) -> float:
        return self._loads.tokens_ahead(address) if self._loads is not None else 0.0

    def _find(self, wanted: RoutingRequest) -> Prefixes:
        """Return what the router's copy of the index shows."""
        if self._loads is None:
            return Prefixes({}, "local")
        if self._loads.is_fresh:
            return Prefixes(self._fleet.table.match(wanted.hashes), "mirror")
        if self._snapshot is None:
            self._snapshot = copy_table(self._fleet.table)
        return Prefixes(self._snapshot.match(wanted.hashes), "outdated")


def copy_table(table: PrefixTable) -> PrefixTable:
    copy: PrefixTable = pickle.loads(pickle.dumps(table))  # deepcopy would share the table's bound methods
    return copy
