"""The choice of a worker by the score, from what this router knows at the moment. No I/O: `fairlead simulate` runs it too."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import monotonic
from typing import Literal, Protocol

from fairlead_index.hashing import hash_bytes
from fairlead_index.score import CONSIDERED, SMALL_FLEET, ScoredWorker, StartEstimate, rank_candidates
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.policies import Choice, RoutingRequest, Tried
from fairlead_router.routing.prompts_in_flight import PromptsInFlight, prefer_computing
from fairlead_router.routing.sent_prefixes import SentPrefixes, expect_at_homes

BLOCK_TOKENS = 64
"""Block size assumed where nothing shows it: the least cost of a prompt, tokens."""
ALONE_SECONDS = 60.0
"""Time without a reservation of another router after which this one knows all prompts in flight."""
MAX_UNINDEXED = 4
"""Workers of a large fleet, the soonest by this router's own view, that are considered in case the index lacks them."""

Source = Literal["mirror", "remote", "late", "outdated", "local"]
"""`mirror`: the copy of the index, `remote`: Redis, `late`: Redis, whose answer came too late. Without Redis, `outdated`: the copy's last
state, `local`: nothing."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The tokens of a prompt that workers hold, by address, and where that is from. Of a large fleet, those of the deepest holders."""

    held: Mapping[str, int]
    source: Source

    @property
    def is_current(self) -> bool:
        return self.source in ("mirror", "remote")

    @property
    def counts_sent(self) -> bool:
        """Whether the index cannot show what this router has sent, so that it counts as held."""
        return self.source in ("outdated", "local")


@dataclass(frozen=True, slots=True)
class Ranking:
    """Workers, best first. `source`: where the cached prefixes are from; `local`: only what this router has sent."""

    source: Literal["mirror", "remote", "local"]
    starts: list[StartEstimate]


class Loads(Protocol):
    """The index's loads and all routers' reservations: a `FleetReader`."""

    @property
    def is_fresh(self) -> bool: ...

    @property
    def workers(self) -> Mapping[str, ScoredWorker]: ...

    @property
    def soonest(self) -> Iterable[str]: ...

    @property
    def others_changed_at(self) -> float: ...

    def refresh(self, scored: ScoredWorker) -> None: ...

    def reserve(self, address: str, tokens: float) -> bytes: ...

    def release(self, reservation: bytes) -> bool: ...


class Chooser:
    """Chooses workers, and remembers what it has sent.

    Up to SMALL_FLEET workers are all scored. Of a larger fleet these are the deepest holders of the prompt, then the soonest, CONSIDERED in
    all, so the cost of a choice does not grow with the fleet.
    """

    def __init__(
        self,
        table: WorkerTable,
        loads: Loads | None,
        keep_candidates: bool = False,
        clock: Callable[[], float] = monotonic,
        draw: Callable[[], bytes] = lambda: os.urandom(8),
    ) -> None:
        """`loads`: None without an index. `keep_candidates`: choices have the compared workers. `draw`: returns 8 random bytes."""
        self._table, self._loads, self._keep_candidates, self._clock, self._draw = table, loads, keep_candidates, clock, draw
        self._sent, self._in_flight = SentPrefixes(), PromptsInFlight()

    def choose(self, request: RoutingRequest, tried: Tried, prefixes: Prefixes) -> Choice | None:
        """Choose a worker and reserve its work; None while there is none."""
        starts = self._rank(request, tried, prefixes, CONSIDERED if self._keep_candidates else 1)
        if not starts:
            return None
        best, kept = starts[0], starts if self._keep_candidates else ()
        worker, held = self._table.get(best.address), prefixes.held.get(best.address, 0)
        assert worker is not None  # nothing was awaited since it was listed
        if prefixes.is_current:
            self._sent.clear()
            reservation = self._reserve(best.address, best.cost)
            rest = request.hashes_of(worker)[held // self._block_tokens(request, worker.address) :]
            self._in_flight.add(reservation, worker.address, rest, self._clock())
            return Choice(worker, best.cached, max(0, best.cached - held), reservation=reservation, candidates=kept)
        cached = min(best.cached, self.known(request, prefixes).get(best.address, 0))  # what is only expected at a home may not be there
        if prefixes.counts_sent:
            self._sent.add(worker, self._block_tokens(request, worker.address), request.hashes_of(worker))
        reservation = self._reserve(best.address, request.prompt_tokens - cached)
        return Choice(worker, cached, is_outdated=True, reservation=reservation, candidates=kept)

    def release(self, reservation: bytes) -> None:
        """End a reservation: the answer has begun, or the attempt has failed."""
        self._in_flight.remove(reservation)
        if self._loads is not None:
            self._loads.release(reservation)

    def rank(self, request: RoutingRequest, prefixes: Prefixes) -> Ranking:
        """Return the workers that `choose` compares, without a reservation."""
        shown: dict[Source, Literal["mirror", "remote", "local"]] = {"mirror": "mirror", "outdated": "mirror", "local": "local"}
        return Ranking(shown.get(prefixes.source, "remote"), self._rank(request, (), prefixes, CONSIDERED))

    def known(self, request: RoutingRequest, prefixes: Prefixes) -> Mapping[str, int]:
        """Return the prompt's tokens that workers hold, by address; while Redis is away, with what this router has sent since."""
        held = prefixes.held
        if prefixes.counts_sent:
            for hashes in request.chains:
                held = self._sent.add_to(held, hashes)
        return held

    def soonest(self, request: RoutingRequest, tried: Tried) -> list[str]:
        """Return the workers that can start a prompt soonest: the index's order, after those that it lacks; [] for a small fleet."""
        table, loads, model = self._table, self._loads, request.model
        if len(table.usable(tried, model)) <= SMALL_FLEET:
            return []
        if loads is None or not loads.is_fresh:
            return [worker.address for worker in table.soonest(CONSIDERED, tried, model)]
        here = [worker.address for worker in table.soonest(MAX_UNINDEXED, tried, model)]
        found, allowed = [address for address in here if address not in loads.workers], table.eligible_addresses(tried, model)
        found += islice((address for address in loads.soonest if address in allowed), CONSIDERED - len(found))
        return found or here

    def _rank(self, request: RoutingRequest, tried: Tried, prefixes: Prefixes, wanted: int) -> list[StartEstimate]:
        held, computing = self._expected(request, tried, prefixes), self._computing(request, prefixes)
        if computing:
            held = {**held, **computing}
        workers = self._table.considered(held, self.soonest(request, tried), tried, request.model)
        scored = [self._score(request, worker, held.get(worker.address, 0)) for worker in workers]
        asked = len(scored) if computing else wanted
        starts = rank_candidates(scored, hash_bytes(request.hashes), request.prompt_tokens, self._draw(), asked)
        return prefer_computing(starts, computing)[:wanted]

    def _expected(self, request: RoutingRequest, tried: Tried, prefixes: Prefixes) -> Mapping[str, int]:
        """Return the prompt's tokens that workers hold, by address; while Redis is away, longer prefixes are expected at their homes."""
        held = self.known(request, prefixes)
        if not prefixes.counts_sent or not len(request.hashes):
            return held
        allowed = self._table.eligible_addresses(tried, request.model)

        def block_tokens_of(worker: Worker) -> int:
            return self._block_tokens(request, worker.address)

        return expect_at_homes(held, request.hashes, block_tokens_of, lambda place: self._table.home(place, allowed))

    def _computing(self, request: RoutingRequest, prefixes: Prefixes) -> dict[str, int]:
        """Return the tokens by address that workers will hold beyond the index, because this router has sent them a prompt with these.

        Nothing while other routers send too: each knows its own part of a burst, and several would gather it at one worker.
        """
        found: dict[str, int] = {}
        loads, now = self._loads, self._clock()
        if loads is None or not prefixes.is_current or now - loads.others_changed_at <= ALONE_SECONDS:
            return found
        for hashes in request.chains:
            found |= self._in_flight.extend(prefixes.held, hashes, partial(self._block_tokens, request), now)
        return found

    def _score(self, request: RoutingRequest, worker: Worker, held: int) -> ScoredWorker:
        """Return the score's input: the index's load and all routers' reservations, else the worker's own report and this router's."""
        loads, now = self._loads, self._clock()
        scored = loads.workers.get(worker.address) if loads is not None and loads.is_fresh else None
        if scored is not None and loads is not None:
            loads.refresh(scored)
        else:
            scored = ScoredWorker(worker.address, self._block_tokens(request, worker.address), worker.load, now - worker.load_at)
        scored.reserved_tokens = max(scored.reserved_tokens, worker.sent_tokens(now) - scored.backlog)  # no report may show them yet
        scored.depth = held // scored.block_tokens
        return scored

    def _block_tokens(self, request: RoutingRequest, address: str) -> int:
        """Return a worker's block size in tokens: as the index has it, else about that of the request's hashes."""
        known = self._loads.workers.get(address) if self._loads is not None else None
        if known is not None:
            return known.block_tokens
        return request.prompt_tokens // len(request.hashes) if len(request.hashes) else BLOCK_TOKENS

    def _reserve(self, address: str, tokens: float) -> bytes:
        return self._loads.reserve(address, tokens) if self._loads is not None else b""
