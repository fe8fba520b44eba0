"""The router's own picture of the workers: what discovery named, what each last said of itself, and how our requests fared there."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from time import monotonic

from fairlead_index.load import WorkerLoad
from fairlead_index.paths import with_port
from fairlead_router.fleet.adapters import Adapter, Told, merged
from fairlead_router.fleet.breaker import Breaker
from fairlead_router.fleet.prediction import Prediction
from fairlead_router.wire.pool import SILENCE_SECONDS, Pool

FORGET_SECONDS = 30.0
"""How long an address that was dropped is refused to the index, whose lease outlives the pod by up to 10 s."""
UNKNOWN_RATE = 2000.0
"""Prompt tokens a second assumed of a worker that has not measured its own; only compared between workers."""
UNSEEN = "not looked at yet"
"""The reason of a worker that no look has reached."""


class Worker:
    """One address. `ready`, `draining`, `load` are what it said last; `silent` means that it has ceased to answer at all."""

    def __init__(
        self,
        address: str,
        clock: Callable[[], float],
        discovered: bool,
        silence_timeout: float = SILENCE_SECONDS,
        admin_port: int | None = None,
    ) -> None:
        self.address = address
        self.discovered = discovered
        self.pool = Pool(address, silence_timeout)
        self.admin = self.pool if admin_port is None else Pool(with_port(address, admin_port), silence_timeout)
        """Where it is polled."""
        self.breaker = Breaker(clock)
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
        """What it is for; empty or `both`: whole requests."""
        self.adapters: Told = {}
        """Model names beyond its model's own that it answers to."""
        self.models: frozenset[str] = frozenset()
        """Its model's own names, as its prompt format says."""
        self.prediction = Prediction()
        self.format_tag = ""
        self.in_flight = 0
        self.pending_tokens = 0
        """Prompt tokens of our attempts whose answer has not begun: the part of its backlog that no report can show yet."""
        self.unanswered = 0
        """Our attempts whose answer has not begun."""
        self.max_running = 0
        """Requests that it can run at once, as it says; 0: unknown."""
        self.look_now = asyncio.Event()

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

    @property
    def rate(self) -> float:
        return self.load.prefill_rate if self.load.prefill_rate > 0 else UNKNOWN_RATE

    def close(self) -> None:
        """Close the connections that are idle."""
        self.pool.close()
        self.admin.close()

    def suspect(self) -> None:
        """A request of ours found it refusing or gone: not chosen until the next look, which is asked for at once."""
        self.ready = False
        self.look_now.set()


class WorkerTable:
    """Every worker known, by address."""

    def __init__(
        self, clock: Callable[[], float] = monotonic, silence_timeout: float = SILENCE_SECONDS, admin_port: int | None = None
    ) -> None:
        """`admin_port`: at which workers are polled; None: at the port that discovery names."""
        self._clock, self._silence_timeout, self._admin_port = clock, silence_timeout, admin_port
        self._workers: dict[str, Worker] = {}
        self._dropped: dict[str, float] = {}
        self._adapters: dict[str, Adapter] = {}
        self._pulse = asyncio.Event()
        self.on_added: Callable[[Worker], None] = lambda worker: None

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))  # a copy: tasks add and drop meanwhile

    def get(self, address: str) -> Worker | None:
        return self._workers.get(address)

    def usable(self, excluded: Collection[tuple[str, int]] = (), model: str = "") -> list[Worker]:
        """Workers that may be chosen; those that have only fallen silent where there are no others. `excluded`: (address, life)."""
        left = [worker for worker in self._workers.values() if (worker.address, worker.life) not in excluded and worker.serves(model)]
        return [worker for worker in left if worker.usable] or [worker for worker in left if worker.last_resort]

    def any_usable(self) -> bool:
        """Whether `usable()` would name any, without going through all: asked for each request."""
        return any((worker.usable or worker.last_resort) and worker.serves("") for worker in self._workers.values())

    def adapters(self) -> Mapping[str, Adapter]:
        """What the workers serve beside their model, as far as they were heard; while there are none, what the last ones served: requests
        wait for their like (scaled to zero, or all restarting) and are not told that there is no such model."""
        return self._adapters

    def adapters_changed(self) -> None:
        """A worker has others than before, or is gone."""
        heard = [worker.adapters for worker in self._workers.values() if worker.ready and not worker.reason]
        if heard:
            self._adapters = merged(heard)

    def unusable_addresses(self, model: str = "") -> set[str]:
        """What the index must not choose: known and not usable for such a request, or dropped a moment ago."""
        limit = self._clock() - FORGET_SECONDS
        self._dropped = {address: since for address, since in self._dropped.items() if since > limit}
        barred = {worker.address for worker in self._workers.values() if not (worker.usable and worker.serves(model))}
        return barred | self._dropped.keys()

    def discovered(self, addresses: Collection[str]) -> None:
        """Discovery's newest answer: a worker that is not in it is gone at once (streams under way there go on)."""
        for address in addresses:
            self._dropped.pop(address, None)
            worker = self._workers.get(address) or self._add(address, discovered=True)
            worker.discovered = True
        for worker in [worker for worker in self._workers.values() if worker.discovered and worker.address not in addresses]:
            self.drop(worker)

    def adopt(self, address: str) -> Worker | None:
        """A worker that only the index knows: its lease is good, discovery lags behind. None where it was dropped a moment ago."""
        if address in self._dropped:
            return None
        worker = self._workers.get(address)
        if worker is None:
            worker = self._add(address, discovered=False)
            worker.ready = True
        return worker

    def drop(self, worker: Worker) -> None:
        """Gone, and refused to the index until discovery names it again or every lease of its time is over."""
        if self._workers.get(worker.address) is worker:
            del self._workers[worker.address]
            self._dropped[worker.address] = self._clock()
        worker.ready = False
        worker.close()
        self.adapters_changed()
        self.notify()

    def notify(self) -> None:
        """Something changed: whoever waits for a worker looks again."""
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def changed(self, timeout: float) -> None:
        """Return at the next change, or after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._pulse.wait(), timeout)
        except TimeoutError:
            pass

    def _add(self, address: str, discovered: bool) -> Worker:
        worker = self._workers[address] = Worker(address, self._clock, discovered, self._silence_timeout, self._admin_port)
        self.on_added(worker)
        self.notify()
        return worker
