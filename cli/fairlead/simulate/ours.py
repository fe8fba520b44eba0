"""Fairlead's own routing: the score of route.lua while Redis is available, and the router's local fallback otherwise."""

import random

from fairlead.simulate.fleet import Fleet, InflightRequests
from fairlead.simulate.router_view import RouterView
from fairlead.simulate.workloads.request import Request
from fairlead_index.hash_ring import Ring
from fairlead_index.hashing import hash_bytes
from fairlead_index.score import ScoredWorker, rank_candidates
from fairlead_router.fleet.workers import Worker
from fairlead_router.routing.local_fallback import choose_soonest
from fairlead_router.routing.policies import RoutingRequest

ARRIVAL_SECONDS = 0.25  # route.lua: the load includes reservations that are older than it by at least this time
RETURN_SECONDS = 4.0
"""Delay after an outage of Redis: a reader's longest pause (2 s), and the workers' snapshots into the empty server (2 s)."""


class Fairlead:
    """Lowest expected time to first token, from the workers' last load reports and the reservations that all routers share."""

    reserves = True

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> None:
        self._fleet, self._draw = fleet, draw
        self._ring = Ring(str(number) for number in range(len(fleet.pods)))

    def choose(self, request: Request, now: float) -> tuple[int, int]:
        fleet, depths = self._fleet, self._fleet.depths(request.blocks)
        workers = []
        for number in fleet.usable:
            at, load = fleet.pods[number].load(now)
            workers.append(
                ScoredWorker(
                    address=str(number),
                    block_tokens=fleet.block_tokens,
                    depth=depths[number],
                    reserved_tokens=fleet.inflight.reserved(number, at - ARRIVAL_SECONDS),
                    waiting=load.waiting,
                    backlog=load.backlog_tokens,
                    rate=load.prefill_rate,
                    step=load.step_seconds,
                    load_age=now - at,
                    pages_free=load.pages_free,
                    pages_total=load.pages_total,
                    page_size=load.page_size,
                    arrivals=load.arrival_rate,
                )
            )
        blocks = request.blocks[: request.prompt_tokens // fleet.block_tokens]
        homes = [home for home in self._ring.homes(blocks[0], 2) if int(home) in fleet.usable] if blocks else ()
        best = rank_candidates(workers, hash_bytes(blocks), request.prompt_tokens, self._draw.randbytes(8), 1, homes)[0]
        return int(best.address), best.cached


class WithoutRedis:
    """PrefixAware from the router's own knowledge: loads of its last poll, and its own in-flight requests. It runs the router's code."""

    reserves = False

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> None:
        self._fleet, self._view = fleet, RouterView(fleet, inflight, draw)
        self._by_address = {worker.address: number for number, worker in enumerate(self._view.workers)}
        self._ring = Ring(self._by_address)
        random.seed(draw.random())  # the router breaks ties at random: equal seeds must give equal choices

    def choose(self, request: Request, now: float) -> tuple[int, int]:
        whole = request.blocks[: request.prompt_tokens // self._fleet.block_tokens]
        chosen = choose_soonest(RoutingRequest(request.prompt_tokens, whole), self._view.usable(now), self._home, now)
        return self._by_address[chosen.address], 0

    def _home(self, place: int) -> Worker | None:
        number = self._by_address[self._ring.homes(place, 1)[0]]
        return self._view.workers[number] if number in self._fleet.usable else None


class WithRedisOutage:
    """`Fairlead`, replaced by `WithoutRedis` during an outage of Redis. `away`: its start and end in seconds of the run."""

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random, away: tuple[float, float]) -> None:
        self._with, self._without = Fairlead(fleet, inflight, draw), WithoutRedis(fleet, inflight, draw)
        self._from, self._to = away[0], away[1] + RETURN_SECONDS
        self.reserves = True

    def choose(self, request: Request, now: float) -> tuple[int, int]:
        self.reserves = not self._from <= now < self._to
        return (self._with if self.reserves else self._without).choose(request, now)
