"""The router's own picture of the workers: what discovery named, what each last said of itself, and how our requests fared there."""

import asyncio
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from time import monotonic
from typing import Any

from fairlead_common.http.inference_paths import with_port
from fairlead_index.hash_ring import Ring
from fairlead_index.mirror.start_order import StartOrder
from fairlead_index.score import NO_ROOM, SMALL_FLEET, USUAL_TOKENS
from fairlead_index.worker_load import WorkerLoad
from fairlead_router.fleet.adapters import Adapter, Told, merged
from fairlead_router.fleet.circuit_breaker import Breaker
from fairlead_router.fleet.prediction_error import Prediction
from fairlead_router.wire.connection_pool import SILENCE_SECONDS, Pool

UNKNOWN_RATE = 2000.0
"""Prompt tokens a second assumed of a worker that has not measured its own; only compared between workers."""
POLL_AGAIN_SECONDS = 0.1
"""Between two polls that are asked for because the index speaks of another incarnation."""
MOST_VIEWS = 64
"""Models whose usable workers are remembered."""
UNSEEN = "not looked at yet"
"""The reason of a worker that no look has reached."""


def _of_choice(name: str) -> Any:
    """Return a property that calls the worker's `on_choice` when its value changes. For what decides whether the worker may be chosen."""
    kept = "_" + name

    def put(worker: "Worker", value: object) -> None:
        changed = getattr(worker, kept, None) != value
        setattr(worker, kept, value)
        if changed:  # each look sets them all: 500 workers would else clear the views 2,500 times a second
            worker.on_choice()

    return property(attrgetter(kept), put)  # reading it costs no call of Python


def _of_wait(name: str) -> Any:
    """Return a property that calls the worker's `on_wait` whenever it is set. For what decides how soon the worker could begin a prompt."""
    kept = "_" + name

    def put(worker: "Worker", value: object) -> None:
        setattr(worker, kept, value)
        worker.on_wait(worker.address)

    return property(attrgetter(kept), put)


class Worker:
    """One address. `ready`, `draining`, `load` are what it said last; `silent` means that it has ceased to answer at all.

    Its table is told when an attribute changes that choices depend on, so that a request need not go through all workers.
    """

    ready: bool = _of_choice("ready")
    draining: bool = _of_choice("draining")
    silent: bool = _of_choice("silent")
    role: str = _of_choice("role")
    """What it is for; empty or `both`: whole requests."""
    adapters: Told = _of_choice("adapters")
    """Model names beyond its model's own that it answers to."""
    models: frozenset[str] = _of_choice("models")
    """Its model's own names, as its prompt format says."""
    load: WorkerLoad = _of_wait("load")
    pending_tokens: int = _of_wait("pending_tokens")
    """Prompt tokens of our attempts whose answer has not begun: the part of its backlog that no report can show yet."""

    def __init__(
        self, address: str, clock: Callable[[], float], silence_timeout: float = SILENCE_SECONDS, admin_port: int | None = None
    ) -> None:
        self.on_choice: Callable[[], None] = lambda: None
        self.on_wait: Callable[[str], None] = lambda address: None
        self.address = address
        self.pool = Pool(address, silence_timeout)
        self.admin = self.pool if admin_port is None else Pool(with_port(address, admin_port), silence_timeout)
        """Where it is polled."""
        self.breaker = Breaker(clock, lambda: self.on_choice())
        self.incarnation = ""
        """Of its records in the index, as it says itself; empty: it is in no index."""
        self.looked_at = 0.0
        self.pod = ""
        self.ready = False
        self.draining = False
        self.silent = False
        self.life = 0
        """A new number each time a look finds it ready after one that did not: another process, or one that has recovered."""
        self.seen_down = True
        """The last look did not find it ready."""
        self.reason = UNSEEN
        """Why the last look did not find it ready; empty when it did."""
        self.load = WorkerLoad()
        self.load_at = monotonic()
        self.canary = ""
        """The revision that it is the canary of; empty for all others."""
        self.role = ""
        self.adapters = {}
        self.models = frozenset()
        self.prediction = Prediction()
        self.format_tag = ""
        self.in_flight = 0
        self.pending_tokens = 0
        self.unanswered = 0
        """Our attempts whose answer has not begun."""
        self.max_running = 0
        """Requests that it can run at once, as it says; 0: unknown."""
        self.look_now = asyncio.Event()
        self.suspected = False
        """A request of ours failed there since the last look began, so that look's answer may be older than the failure."""

    @property
    def usable(self) -> bool:
        return self.ready and not self.draining and not self.silent and self.breaker.closed

    @property
    def last_resort(self) -> bool:
        """It was ready when last heard, and only slow to answer since: better than no worker at all."""
        return self.ready and not self.draining and self.breaker.closed

    def serves(self, model: str) -> bool:
        """Whether such a request may go there at all, however loaded it is. `model`: as in `Wanted`."""
        return self.role in ("", "both") and (not model or model in self.models or model in self.adapters)

    def expected_wait(self) -> float:
        """Seconds until a prompt sent now would be begun, as this router knows it."""
        backlog = max(self.load.backlog_tokens, self.pending_tokens)
        return backlog / self.rate + self.load.step_seconds + 1e-3 * max(self.in_flight, self.load.running + self.load.waiting)

    def ready_at(self, now: float) -> float:
        """When it could begin a prompt, as this router knows it `now`, monotonic seconds; later where it has no room for a usual prompt."""
        load, waiting = self.load, max(self.in_flight, self.load.running + self.load.waiting)
        begins = max(self.load_at + load.backlog_tokens / self.rate, now + self.pending_tokens / self.rate)
        full = load.pages_total and load.page_size and load.pages_free * load.page_size < USUAL_TOKENS
        return begins + load.step_seconds + 1e-3 * waiting + (NO_ROOM if full else 0.0)

    @property
    def rate(self) -> float:
        return self.load.prefill_rate if self.load.prefill_rate > 0 else UNKNOWN_RATE

    def close(self) -> None:
        """Close the connections that are idle."""
        self.pool.close()
        self.admin.close()

    def suspect(self) -> None:
        """A request of ours found it refusing or gone: not chosen until the next look, which is asked for at once."""
        self.ready, self.suspected = False, True
        self.look_now.set()

    def poll_soon(self) -> None:
        """The index speaks of another incarnation than it last reported: ask it now, unless that has just been done."""
        if monotonic() - self.looked_at > POLL_AGAIN_SECONDS:
            self.look_now.set()


class _Untried:
    """Addresses without those of excluded workers. Each address is tested when asked for, so a second attempt copies no large fleet."""

    def __init__(self, addresses: frozenset[str], workers: Mapping[str, Worker], excluded: Collection[tuple[str, int]]) -> None:
        self._addresses, self._workers, self._excluded = addresses, workers, excluded

    def __contains__(self, address: object) -> bool:
        return address in self._addresses and (address, self._workers[address].life) not in self._excluded


@dataclass(frozen=True, slots=True)
class _View:
    """What may be chosen for a model, until a worker changes."""

    usable: list[Worker]
    last_resort: list[Worker]
    """Those that have only fallen silent."""
    addresses: frozenset[str]
    """Of the usable ones."""
    barred: frozenset[str]
    """All other addresses."""


class WorkerTable:
    """The workers that discovery names, by address. Requests go to no other."""

    def __init__(
        self, clock: Callable[[], float] = monotonic, silence_timeout: float = SILENCE_SECONDS, admin_port: int | None = None
    ) -> None:
        """`admin_port`: at which workers are polled; None: at the port that discovery names."""
        self._clock, self._silence_timeout, self._admin_port = clock, silence_timeout, admin_port
        self._workers: dict[str, Worker] = {}
        self._views: dict[str, _View] = {}
        self._order, self._moved = StartOrder(), set[str]()
        self._ring = Ring()
        self._adapters: dict[str, Adapter] = {}
        self._pulse = asyncio.Event()
        self.on_added: Callable[[Worker], None] = lambda worker: None
        self.on_incarnation: Callable[[], None] = lambda: None
        """Called when a worker reports another incarnation than before."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))  # a copy: tasks add and drop meanwhile

    def get(self, address: str) -> Worker | None:
        return self._workers.get(address)

    def usable(self, excluded: Collection[tuple[str, int]] = (), model: str = "") -> Sequence[Worker]:
        """Workers that may be chosen; those that have only fallen silent where there are no others. `excluded`: (address, life)."""
        view = self._view(model)
        if not excluded:
            return view.usable or view.last_resort
        return _without(view.usable, excluded) or _without(view.last_resort, excluded)

    def may(self, excluded: Collection[tuple[str, int]] = (), model: str = "") -> Container[str]:
        """Addresses of the workers that are usable for such a request."""
        addresses = self._view(model).addresses
        return _Untried(addresses, self._workers, excluded) if excluded else addresses

    def soonest(self, count: int, excluded: Collection[tuple[str, int]] = (), model: str = "") -> Sequence[Worker]:
        """As `usable`, of a large fleet only the `count` that could begin a prompt soonest, as this router knows it."""
        view = self._view(model)
        if len(view.usable) <= SMALL_FLEET:
            return self.usable(excluded, model)
        self._reorder()
        may = self.may(excluded, model)
        found = list(islice((address for address in self._order if address in may), count))
        return [self._workers[address] for address in found] or _without(view.last_resort, excluded)

    def home(self, place: int, may: Container[str]) -> Worker | None:
        """The worker that every router would name for a place on the ring, among the addresses in `may`."""
        address = self._ring.home(place, may)
        return self._workers[address] if address is not None else None

    def homes(self, place: int, count: int, may: Container[str]) -> list[str]:
        """As `Ring.homes`."""
        return self._ring.homes(place, count, may)

    def any_usable(self) -> bool:
        """Whether `usable()` would name any."""
        return bool(self.usable())

    def adapters(self) -> Mapping[str, Adapter]:
        """What the workers serve beside their model, as far as they were heard; while there are none, what the last ones served: requests
        wait for their like (scaled to zero, or all restarting) and are not told that there is no such model."""
        return self._adapters

    def adapters_changed(self) -> None:
        """A worker has others than before, or is gone."""
        heard = [worker.adapters for worker in self._workers.values() if worker.ready and not worker.reason]
        if heard:
            self._adapters = merged(heard)

    def unusable_addresses(self, model: str = "") -> frozenset[str]:
        """What the index must not choose: known and not usable for such a request."""
        return self._view(model).barred

    def discovered(self, addresses: Collection[str]) -> None:
        """Discovery's newest answer: a worker that is not in it is gone at once (streams under way there go on)."""
        for address in addresses:
            if address not in self._workers:
                self._add(address)
        for worker in [worker for worker in self._workers.values() if worker.address not in addresses]:
            self._drop(worker)

    def _drop(self, worker: Worker) -> None:
        del self._workers[worker.address]
        self._order.discard(worker.address)
        self._moved.discard(worker.address)
        self._ring.discard(worker.address)
        worker.on_choice, worker.on_wait = (lambda: None), (lambda address: None)
        worker.ready = False
        worker.close()
        self._views.clear()
        self.adapters_changed()
        self.notify()

    def notify(self) -> None:
        """Something changed: whoever waits for a worker looks again."""
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def changed(self, timeout: float) -> None:
        """Return at the next change, or after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._pulse.wait()
        except TimeoutError:
            pass

    def _add(self, address: str) -> None:
        worker = self._workers[address] = Worker(address, self._clock, self._silence_timeout, self._admin_port)
        worker.on_choice, worker.on_wait = self._views.clear, self._moved.add
        self._views.clear()
        self._moved.add(address)
        self._ring.add(address)
        self.on_added(worker)
        self.notify()

    def _view(self, model: str) -> _View:
        view = self._views.get(model)
        if view is None:
            known = list(self._workers.values())
            serving = [worker for worker in known if worker.serves(model)]
            usable = [worker for worker in serving if worker.usable]
            addresses = frozenset(worker.address for worker in usable)
            barred = frozenset(worker.address for worker in known) - addresses
            view = _View(usable, [worker for worker in serving if worker.last_resort], addresses, barred)
            if len(self._views) < MOST_VIEWS:
                self._views[model] = view
        return view

    def _reorder(self) -> None:
        if self._moved:
            now = monotonic()
            for address in self._moved:
                self._order.set(address, self._workers[address].ready_at(now))
            self._moved.clear()


def _without(workers: Sequence[Worker], excluded: Collection[tuple[str, int]]) -> Sequence[Worker]:
    return [worker for worker in workers if (worker.address, worker.life) not in excluded]
