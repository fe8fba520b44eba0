"""What one of our routers knows of the workers: loads of its last poll, its own requests in flight, and the index's loads."""

import math
from collections.abc import Iterator

from fairlead.simulate.fleet import Fleet, InflightRequest, InflightRequests
from fairlead.simulate.workloads.request import BLOCK_TOKENS
from fairlead_index.score import ScoredWorker
from fairlead_index.worker_load import WorkerLoad
from fairlead_router.fleet.workers import WorkerTable

POLL_SECONDS = 1.0  # --poll-interval of the router
ARRIVAL_SECONDS = 0.25  # heartbeat.lua: the load includes reservations that are older than it by at least this time
RETURN_SECONDS = 4.0
"""Delay after an outage of Redis: a reader's longest pause (2 s), and the workers' snapshots into the empty server (2 s)."""
NEVER = (math.inf, math.inf)


class RouterView:
    """The router's table of workers, one for each pod. `phase`: when it polls, as a share of the interval."""

    def __init__(self, fleet: Fleet, inflight: InflightRequests, phase: float = 0.0) -> None:
        self._fleet, self._inflight, self._phase = fleet, inflight, phase * POLL_SECONDS
        self.table = WorkerTable(fleet.clock)
        self.table.set_addresses(fleet.addresses)
        self._workers = list(self.table)
        self._usable: list[int] = []

    def update(self) -> None:
        """Bring the workers that may be chosen up to date."""
        fleet, inflight = self._fleet, self._inflight
        if fleet.usable != self._usable:
            self._usable = list(fleet.usable)
            for number, worker in enumerate(self._workers):
                worker.ready = number in self._usable
        polled_at = max(0.0, (fleet.clock.now - self._phase) // POLL_SECONDS * POLL_SECONDS + self._phase)
        for number in self._usable:
            worker, pod = self._workers[number], fleet.pods[number]
            if worker.load_at != polled_at:
                worker.load, worker.load_at = pod.load_at(polled_at), polled_at
            worker.in_flight = inflight.count[number]
            worker.max_running = pod.model.max_running
            worker.runs_cached_first = True  # `queues.ORDER`

    def record_sent(self, flight: InflightRequest) -> None:
        """Record a request of this router."""
        self._workers[flight.pod].begin_prompt(flight.cost, self._fleet.clock.now)

    def record_first_token(self, flight: InflightRequest) -> None:
        """Record that the prompt of a request of this router is computed."""
        self._workers[flight.pod].end_prompt(flight.cost)


class IndexLoads:
    """The index's loads and all routers' reservations, as a router's `FleetReader` has them. `away`: start and end of an outage."""

    def __init__(self, fleet: Fleet, away: tuple[float, float] = NEVER) -> None:
        self._fleet, self._away = fleet, away
        self.others_changed_at = -math.inf if fleet.num_routers == 1 else math.inf
        self.workers = {address: ScoredWorker(address, BLOCK_TOKENS, WorkerLoad()) for address in fleet.addresses}
        self._reservations = 0

    @property
    def is_fresh(self) -> bool:
        """Whether Redis answers."""
        return not self._away[0] <= self._fleet.clock.now < self._away[1] + RETURN_SECONDS

    @property
    def soonest(self) -> Iterator[str]:
        """The workers in the order in which they can start a prompt."""
        for scored in self.workers.values():
            self.refresh(scored)
        return iter(sorted(self.workers, key=lambda address: self.workers[address].ready_key(self._fleet.clock.now)))

    def refresh(self, scored: ScoredWorker) -> None:
        number, now = self._fleet.number_of[scored.address], self._fleet.clock.now
        at, scored.load = self._fleet.pods[number].load(now)
        scored.reserved_tokens, scored.load_age = self._fleet.inflight.reserved(number, at - ARRIVAL_SECONDS), now - at

    def reserve(self, address: str, tokens: float) -> bytes:
        """Return the name of a reservation: the fleet counts it with its request (`InflightRequest.reservation`)."""
        self._reservations += 1
        return self._reservations.to_bytes(8, "big") if self.is_fresh else b""

    def release(self, reservation: bytes) -> bool:
        return True

    def tokens_ahead(self, address: str) -> float:
        """Return the prompt tokens before a new prompt at a pod; 0 while Redis is away."""
        scored = self.workers[address]
        self.refresh(scored)
        return scored.tokens_ahead if self.is_fresh else 0.0
