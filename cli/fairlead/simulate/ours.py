"""Fairlead's own routing: the score of route.lua while Redis is available, the router's mirror while not, or no index at all."""

import pickle
import random

from fairlead.simulate.fleet import Fleet, InflightRequests
from fairlead.simulate.router_view import RouterView
from fairlead.simulate.workloads.request import Request
from fairlead_index.hash_ring import Ring
from fairlead_index.hashing import hash_bytes
from fairlead_index.mirror.prefix_table import PrefixTable
from fairlead_index.score import ScoredWorker, rank_candidates
from fairlead_router.fleet.workers import Worker
from fairlead_router.routing.local_fallback import choose_soonest, score_locally
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.sent_prefixes import SentPrefixes, expect_at_homes

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


class FromMirror:
    """PrefixAware while Redis is away: the mirror's last snapshot, what this router has sent since, and the loads of `WithoutRedis`."""

    reserves = False

    def __init__(self, fleet: Fleet, view: RouterView, draw: random.Random) -> None:
        self._fleet, self._view, self._draw = fleet, view, draw
        self._addresses = [worker.address for worker in view.workers]
        self._ring = Ring(self._addresses)
        self._snapshot: PrefixTable = pickle.loads(pickle.dumps(fleet.table))  # deepcopy would share the table's bound methods
        self._sent = SentPrefixes()

    def choose(self, request: Request, now: float) -> tuple[int, int]:
        fleet, workers = self._fleet, dict(zip(self._fleet.usable, self._view.usable(now), strict=True))
        whole = request.blocks[: request.prompt_tokens // fleet.block_tokens]
        found = self._snapshot.match(whole)
        snapshot = {worker.address: found.get(str(number), 0) * fleet.block_tokens for number, worker in workers.items()}
        held = self._sent.add_to(snapshot, whole)
        homes = {worker.address: worker for worker in workers.values()}
        expected = expect_at_homes(held, whole, lambda _: fleet.block_tokens, lambda place: homes.get(self._ring.homes(place, 1)[0]))
        scored = [score_locally(worker, fleet.block_tokens, now) for worker in workers.values()]
        for each in scored:
            each.depth = expected.get(each.address, 0) // fleet.block_tokens
        best = rank_candidates(scored, hash_bytes(whole), request.prompt_tokens, self._draw.randbytes(8), 1)[0]
        self._sent.add(homes[best.address], fleet.block_tokens, whole)
        return self._addresses.index(best.address), min(best.cached, held.get(best.address, 0))


class WithRedisOutage:
    """`Fairlead`, replaced by `FromMirror` during an outage of Redis. `away`: its start and end in seconds of the run."""

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random, away: tuple[float, float]) -> None:
        self._fleet, self._view, self._draw = fleet, RouterView(fleet, inflight, draw), draw
        self._with = Fairlead(fleet, inflight, draw)
        self._mirror: FromMirror | None = None
        self._from, self._to = away[0], away[1] + RETURN_SECONDS
        self.reserves = True

    def choose(self, request: Request, now: float) -> tuple[int, int]:
        self.reserves = not self._from <= now < self._to
        if self.reserves:
            return self._with.choose(request, now)
        if self._mirror is None:
            self._mirror = FromMirror(self._fleet, self._view, self._draw)
        return self._mirror.choose(request, now)
