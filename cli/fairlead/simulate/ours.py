"""Fairlead's own routing: the score of route.lua while Redis is available, the router's mirror while not, or no index at all."""

import pickle
import random
from collections.abc import Collection, Mapping, Sequence

from fairlead.simulate.fleet import Fleet, InflightRequests
from fairlead.simulate.router_view import RouterView
from fairlead.simulate.workloads.request import Request
from fairlead_index.hash_ring import Ring
from fairlead_index.hashing import hash_bytes
from fairlead_index.mirror.prefix_table import PrefixTable
from fairlead_index.score import ScoredWorker, StartEstimate, prefill_seconds, rank_candidates
from fairlead_router.fleet.workers import Worker
from fairlead_router.routing.local_fallback import choose_soonest, score_locally
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.prompts_in_flight import prefer_computing
from fairlead_router.routing.ranking import rank_locally
from fairlead_router.routing.sent_prefixes import SentPrefixes, expect_at_homes

ARRIVAL_SECONDS = 0.25  # route.lua: the load includes reservations that are older than it by at least this time
RETURN_SECONDS = 4.0
"""Delay after an outage of Redis: a reader's longest pause (2 s), and the workers' snapshots into the empty server (2 s)."""


class Fairlead:
    """Lowest expected time to first token, from the workers' last load reports and the reservations that all routers share.

    A single router also counts the prompts that it has sent as held, as `MirrorRouting` does.
    """

    reserves = True

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> None:
        self._fleet, self._draw = fleet, draw
        self._ring = Ring(str(number) for number in range(len(fleet.pods)))

    def choose(self, request: Request, now: float, tried: Collection[int] = ()) -> tuple[int, int]:
        best = self._rank(request, now, _untried(self._fleet, tried), 1, self._draw.randbytes(8))[0]
        return int(best.address), best.cached

    def rank(self, request: Request, now: float) -> dict[int, StartEstimate]:
        starts = self._rank(request, now, self._fleet.usable, len(self._fleet.usable), bytes(8))
        return {int(start.address): start for start in starts}

    def prefill_seconds(self, pod: int, now: float) -> float:
        return prefill_seconds(self._read(pod, now))

    def _rank(self, request: Request, now: float, pods: Collection[int], wanted: int, draw: bytes) -> list[StartEstimate]:
        fleet, blocks = self._fleet, self._fleet.whole_blocks(request)
        held = {pod: tokens for pod, depth in enumerate(fleet.depths(request.blocks)) if (tokens := depth * fleet.block_tokens)}
        computing: dict[int, int] = {}
        if fleet.prompts_in_flight is not None:
            by_address = {str(pod): tokens for pod, tokens in held.items()}
            found = fleet.prompts_in_flight.extend(by_address, blocks, lambda _: fleet.block_tokens, now)
            computing = {int(address): tokens for address, tokens in found.items()}
        known = held | computing
        is_cold = len(blocks) > 0 and not any(pod in known for pod in pods)
        homes = [home for home in self._ring.homes(blocks[0], 2) if int(home) in pods] if is_cold else ()
        workers = [self._read(pod, now, known.get(pod, 0) // fleet.block_tokens) for pod in pods]
        asked = len(workers) if computing else wanted
        starts = rank_candidates(workers, hash_bytes(blocks), request.prompt_tokens, draw, asked, homes)
        return prefer_computing(starts, {str(pod): tokens for pod, tokens in computing.items()})[:wanted]

    def _read(self, pod: int, now: float, depth: int = 0) -> ScoredWorker:
        """Return the pod as the index has it."""
        at, load = self._fleet.pods[pod].load(now)
        return ScoredWorker(
            address=str(pod),
            block_tokens=self._fleet.block_tokens,
            depth=depth,
            reserved_tokens=self._fleet.inflight.reserved(pod, at - ARRIVAL_SECONDS),
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


class WithoutRedis:
    """PrefixAware from the router's own knowledge: loads of its last poll, and its own in-flight requests. It runs the router's code."""

    reserves = False

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> None:
        self._fleet, self._view = fleet, RouterView(fleet, inflight, draw)
        self._by_address = {worker.address: number for number, worker in enumerate(self._view.workers)}
        self._ring = Ring(self._by_address)
        random.seed(draw.random())  # the router breaks ties at random: equal seeds must give equal choices

    def choose(self, request: Request, now: float, tried: Collection[int] = ()) -> tuple[int, int]:
        whole = request.blocks[: request.prompt_tokens // self._fleet.block_tokens]
        workers = dict(zip(self._fleet.usable, self._view.usable(now), strict=True))
        allowed = {workers[number].address: workers[number] for number in _untried(self._fleet, tried)}

        def home_of(place: int) -> Worker | None:
            return allowed.get(self._ring.homes(place, 1)[0])

        chosen = choose_soonest(RoutingRequest(request.prompt_tokens, whole), list(allowed.values()), home_of, now)
        return self._by_address[chosen.address], 0

    def rank(self, request: Request, now: float) -> dict[int, StartEstimate]:
        starts = rank_locally(RoutingRequest(request.prompt_tokens), self._view.usable(now), now)
        return {self._by_address[start.address]: start for start in starts}

    def prefill_seconds(self, pod: int, now: float) -> float:
        return 0.0


class FromMirror:
    """PrefixAware while Redis is away: the mirror's last snapshot, what this router has sent since, and the loads of `WithoutRedis`."""

    reserves = False

    def __init__(self, fleet: Fleet, view: RouterView, draw: random.Random) -> None:
        self._fleet, self._view, self._draw = fleet, view, draw
        self._addresses = [worker.address for worker in view.workers]
        self._ring = Ring(self._addresses)
        self._snapshot = copy_table(fleet.table)
        self._sent = SentPrefixes()

    def choose(self, request: Request, now: float, tried: Collection[int] = ()) -> tuple[int, int]:
        whole = request.blocks[: request.prompt_tokens // self._fleet.block_tokens]
        held, scored = self._score(whole, now, tried)
        best = rank_candidates(scored, hash_bytes(whole), request.prompt_tokens, self._draw.randbytes(8), 1)[0]
        number = self._addresses.index(best.address)
        self._sent.add(self._view.workers[number], self._fleet.block_tokens, whole)
        return number, min(best.cached, held.get(best.address, 0))

    def rank(self, request: Request, now: float) -> dict[int, StartEstimate]:
        _, scored = self._score(request.blocks[: request.prompt_tokens // self._fleet.block_tokens], now, ())
        starts = rank_candidates(scored, b"", request.prompt_tokens, bytes(8), len(scored))
        return {self._addresses.index(start.address): start for start in starts}

    def prefill_seconds(self, pod: int, now: float) -> float:
        return 0.0

    def _score(self, whole: Sequence[int], now: float, tried: Collection[int]) -> tuple[Mapping[str, int], list[ScoredWorker]]:
        """Return the tokens that workers hold, as far as this router knows, and the input of the score."""
        fleet, found = self._fleet, self._snapshot.match(whole)
        usable = dict(zip(fleet.usable, self._view.usable(now), strict=True))
        workers = {usable[number].address: usable[number] for number in _untried(fleet, tried)}
        snapshot = {address: found.get(str(self._addresses.index(address)), 0) * fleet.block_tokens for address in workers}
        held = self._sent.add_to(snapshot, whole)
        expected = expect_at_homes(held, whole, lambda _: fleet.block_tokens, lambda place: workers.get(self._ring.homes(place, 1)[0]))
        scored = [score_locally(worker, fleet.block_tokens, now) for worker in workers.values()]
        for each in scored:
            each.depth = expected.get(each.address, 0) // fleet.block_tokens
        return held, scored


class WithRedisOutage:
    """`Fairlead`, replaced by `FromMirror` during an outage of Redis. `away`: its start and end in seconds of the run."""

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random, away: tuple[float, float]) -> None:
        self._fleet, self._view, self._draw = fleet, RouterView(fleet, inflight, draw), draw
        self._with = Fairlead(fleet, inflight, draw)
        self._mirror: FromMirror | None = None
        self._from, self._to = away[0], away[1] + RETURN_SECONDS
        self.reserves = True

    def choose(self, request: Request, now: float, tried: Collection[int] = ()) -> tuple[int, int]:
        return self._source(now).choose(request, now, tried)

    def rank(self, request: Request, now: float) -> dict[int, StartEstimate]:
        return self._source(now).rank(request, now)

    def prefill_seconds(self, pod: int, now: float) -> float:
        return self._source(now).prefill_seconds(pod, now)

    def _source(self, now: float) -> Fairlead | FromMirror:
        self.reserves = not self._from <= now < self._to
        if self.reserves:
            return self._with
        if self._mirror is None:
            self._mirror = FromMirror(self._fleet, self._view, self._draw)
        return self._mirror


def copy_table(table: PrefixTable) -> PrefixTable:
    copy: PrefixTable = pickle.loads(pickle.dumps(table))  # deepcopy would share the table's bound methods
    return copy


def _untried(fleet: Fleet, tried: Collection[int]) -> list[int]:
    """Return the usable pods that a request was not withdrawn from, or all if there is no other."""
    return [number for number in fleet.usable if number not in tried] or fleet.usable
