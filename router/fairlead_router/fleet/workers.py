"""The router's view of the workers: addresses from discovery, each worker's last report, and the outcome of requests there."""

import asyncio
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import nlargest
from itertools import chain, islice
from operator import attrgetter
from time import monotonic
from typing import Any

from fairlead_common.http.inference_paths import with_port
from fairlead_index.expected_wait import expected_ttft, ready_key, tokens_ahead
from fairlead_index.hash_ring import Ring
from fairlead_index.mirror.start_order import StartOrder
from fairlead_index.score import CONSIDERED, HOLDERS, SMALL_FLEET
from fairlead_index.worker_load import WorkerLoad
from fairlead_router.fleet.adapters import Adapter, AdaptersByName, MergedAdapters
from fairlead_router.fleet.circuit_breaker import CircuitBreaker
from fairlead_router.fleet.eligibility import Eligibility
from fairlead_router.fleet.prediction_error import PredictionError
from fairlead_router.wire.connection_pool import SILENCE_SECONDS, ConnectionPool

MIN_CHECK_INTERVAL_SECONDS = 0.1
"""Shortest interval between health checks that the index's records of another incarnation cause."""
MAX_CACHED_MODELS = 64
"""Most models whose usable workers are cached."""
MAX_LOAD_CHANGES = 64
"""Most workers whose places in the order a request brings up to date."""
SLICE = 200
"""Workers of which a page or a scrape is built before other work runs."""
NOT_CHECKED = "not checked yet"
"""Reason of a worker before its first health check."""


def _eligibility_attribute(name: str) -> Any:
    """Return a property that calls `on_eligibility_change` when its value changes: it decides whether the worker may be chosen."""
    attribute = "_" + name

    def set_value(worker: "Worker", value: object) -> None:
        changed = getattr(worker, attribute, None) != value
        setattr(worker, attribute, value)
        if changed:  # each check sets all
            worker.on_eligibility_change()

    return property(attrgetter(attribute), set_value)  # attrgetter: a read costs no Python call


def _load_attribute(name: str) -> Any:
    """Return a property that calls `on_load_change` whenever it is set: it decides how soon the worker can begin a prompt."""
    attribute = "_" + name

    def set_value(worker: "Worker", value: object) -> None:
        setattr(worker, attribute, value)
        worker.on_load_change(worker.address)

    return property(attrgetter(attribute), set_value)


class Worker:
    """Worker at one address. `ready`, `draining` and `load` are its last report; `silent`: it no longer answers at all.

    The table gets a callback when an attribute changes that choices depend on, so that a request need not iterate over all workers.
    """

    ready: bool = _eligibility_attribute("ready")
    draining: bool = _eligibility_attribute("draining")
    silent: bool = _eligibility_attribute("silent")
    role: str = _eligibility_attribute("role")
    """Role of the worker; empty or `both`: it serves whole requests."""
    adapters: AdaptersByName = _eligibility_attribute("adapters")
    """LoRA adapters that it serves, beside its model."""
    models: frozenset[str] = _eligibility_attribute("models")
    """Names of its model, from its prompt format."""
    load: WorkerLoad = _load_attribute("load")
    pending_tokens: int = _load_attribute("pending_tokens")
    """Tokens of this router's pending prompts (`PendingPrompt`): the part of the backlog that no report shows yet."""

    def __init__(
        self, address: str, clock: Callable[[], float], silence_timeout: float = SILENCE_SECONDS, admin_port: int | None = None
    ) -> None:
        self.on_eligibility_change: Callable[[], None] = lambda: None
        self.on_load_change: Callable[[str], None] = lambda address: None
        self.address = address
        self.pool = ConnectionPool(address, silence_timeout)
        self.admin = self.pool if admin_port is None else ConnectionPool(with_port(address, admin_port), silence_timeout)
        """Connections for health checks."""
        self.breaker = CircuitBreaker(clock, lambda: self.on_eligibility_change())
        self.incarnation = ""
        """Incarnation of its records in the index, as it reports itself; empty: it is in no index."""
        self.checked_at = 0.0
        self.pod = ""
        self.ready = False
        self.draining = False
        self.silent = False
        self.generation = 0
        """New number each time a check finds it ready after an unready one: a new process, or a recovered one."""
        self.was_unready = True
        """The last check did not find it ready."""
        self.reason = NOT_CHECKED
        """Why the last check did not find it ready; empty when it did."""
        self.load = WorkerLoad()
        self.load_at = monotonic()
        self.fallback = ""
        """Why it runs without CUDA graphs or overlap although they were wanted, as it reports itself; empty: no fallback."""
        self.canary = ""
        """Revision whose canary it is; empty for stable workers."""
        self.runtime = ""
        """Engine behind its agent, such as `vllm`; empty: Fairlead's own."""
        self.role = ""
        self.adapters = {}
        self.models = frozenset()
        self.prediction_error = PredictionError()
        self.format_tag = ""
        self.in_flight = 0
        self.pending_tokens = 0
        self.pending_prompts = 0
        self.prefill_until = 0.0
        """When this router's prompts will be computed, by the measured rate."""
        self.max_running = 0
        """Most requests that it runs concurrently, as reported; 0: unknown."""
        self.runs_cached_first = False
        """Its engine computes the prompts first that it caches most of (`lpm`); False: by arrival, or unknown."""
        self.check_requested = asyncio.Event()
        self.marked_unhealthy = False
        """A request failed there since the last check began, so that check's answer may be older than the failure."""
        self._retried_tokens: dict[str, float] = {}
        """By tenant: expected tokens of requests that another worker got after this one fell silent."""

    @property
    def usable(self) -> bool:
        return self.ready and not self.draining and not self.silent and self.breaker.is_closed

    @property
    def is_last_resort(self) -> bool:
        """Whether it was ready at its last answer and only fell silent since: better than no worker."""
        return self.ready and not self.draining and self.breaker.is_closed

    def serves(self, model: str) -> bool:
        """Return whether the worker can serve such a request, regardless of its load. `model`: as in `RoutingRequest`."""
        return self.role in ("", "both") and (not model or model in self.models or model in self.adapters)

    def sent_tokens(self, now: float) -> float:
        """Return the tokens of this router's pending prompts that it should not have computed yet: all if its rate is unknown."""
        if not self.load.prefill_rate:
            return self.pending_tokens
        return min(self.pending_tokens, max(0.0, self.prefill_until - now) * self.rate)

    def tokens_ahead(self, now: float) -> float:
        """Return the prompt tokens that it computes before a new prompt, by its report and this router's prompts."""
        return tokens_ahead(self.load, now - self.load_at, sent=self.sent_tokens(now))

    def expected_ttft(self, now: float, tokens: float = 0.0) -> float:
        """Return the seconds to the first token of a prompt with `tokens` to compute; without them, until a prompt would begin."""
        return expected_ttft(self.load, self.tokens_ahead(now), tokens)

    def ready_key(self, now: float) -> float:
        """Return its place in the order of the workers that can start a prompt soonest, by this router's view."""
        return ready_key(self.load, self.tokens_ahead(now), now)

    def begin_prompt(self, tokens: int, now: float) -> None:
        """Count a prompt with `tokens` to compute."""
        self.pending_prompts += 1
        self.prefill_until = max(self.prefill_until, now) + tokens / self.rate
        self.pending_tokens += tokens

    def end_prompt(self, tokens: int) -> None:
        """Record that a prompt is computed, or that its attempt failed."""
        self.pending_prompts -= 1
        self.pending_tokens -= tokens
        if not self.pending_prompts:
            self.prefill_until = 0.0

    @property
    def rate(self) -> float:
        return self.load.rate

    def close(self) -> None:
        """Close the idle connections."""
        self.pool.close()
        self.admin.close()

    def mark_unhealthy(self) -> None:
        """Exclude the worker until its next health check, which is requested immediately: a request failed there."""
        self.ready, self.marked_unhealthy = False, True
        self.check_requested.set()

    def record_retried(self, tenant: str, tokens: float) -> None:
        """Record that another worker gets a request of so many expected tokens, which this silent one may have computed."""
        self._retried_tokens[tenant] = self._retried_tokens.get(tenant, 0.0) + tokens

    def price_to_charge(self, tenant: str, price: float) -> float:
        """Return the price of this worker's report without what it computed for retried requests: the tenant pays for the retries."""
        return max(0.0, price - self._retried_tokens.pop(tenant, 0.0))

    def request_check(self) -> None:
        """Request a health check, unless one has just been made: the index holds another incarnation than it last reported."""
        if monotonic() - self.checked_at > MIN_CHECK_INTERVAL_SECONDS:
            self.check_requested.set()


class _NotExcluded:
    """Addresses without excluded workers. Membership is tested lazily, so that a retry does not copy a large fleet."""

    def __init__(self, addresses: Container[str], workers: Mapping[str, Worker], excluded: Collection[tuple[str, int]]) -> None:
        self._addresses, self._workers, self._excluded = addresses, workers, excluded

    def __contains__(self, address: Any) -> bool:
        return address in self._addresses and (address, self._workers[address].generation) not in self._excluded


class WorkerTable:
    """Workers that discovery lists, by address. Requests go to no other."""

    def __init__(
        self, clock: Callable[[], float] = monotonic, silence_timeout: float = SILENCE_SECONDS, admin_port: int | None = None
    ) -> None:
        """`admin_port`: port of the workers' health checks; None: the port from discovery."""
        self._clock, self._silence_timeout, self._admin_port = clock, silence_timeout, admin_port
        self._workers: dict[str, Worker] = {}
        self._eligibility_by_model: dict[str, Eligibility[Worker]] = {}
        self._order, self._load_changed = StartOrder(), set[str]()
        self._ring = Ring()
        self._adapters = MergedAdapters()
        self._change_event = asyncio.Event()
        self.last_runtime = ""
        """Runtime of the worker that reported last, also after the last worker is gone."""
        self._engines: set[str] = set()
        """Addresses of the workers with another engine than Fairlead's."""
        self._lacking: dict[str, dict[str, int]] = {}
        """Workers whose engine does not serve a path: path -> address -> generation."""
        self.on_added: Callable[[Worker], None] = lambda worker: None
        self.on_incarnation: Callable[[], None] = lambda: None
        """Callback for a worker that reports another incarnation than before."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))  # a copy: tasks add and drop meanwhile

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, address: str) -> Worker | None:
        return self._workers.get(address)

    def usable(self, excluded: Collection[tuple[str, int]] = (), model: str = "") -> Sequence[Worker]:
        """Return the eligible workers; if there are none, those that only fell silent. `excluded`: (address, generation).

        Use them before anything is awaited.
        """
        eligibility = self._eligibility(model)
        usable, last_resort = eligibility.usable.workers, eligibility.last_resort.workers
        if not excluded:
            return usable or last_resort
        return _exclude(usable, excluded) or _exclude(last_resort, excluded)

    def eligible_addresses(self, excluded: Collection[tuple[str, int]] = (), model: str = "") -> Container[str]:
        """Return the addresses of the workers that are usable for such a request."""
        addresses = self._eligibility(model).usable.places
        return _NotExcluded(addresses, self._workers, excluded) if excluded else addresses

    def soonest(self, count: int, excluded: Collection[tuple[str, int]] = (), model: str = "") -> Sequence[Worker]:
        """Return `usable`; of a large fleet only the `count` workers that could begin a prompt soonest, by this router's view."""
        eligibility = self._eligibility(model)
        if len(eligibility.usable.workers) <= SMALL_FLEET:
            return self.usable(excluded, model)
        self._update_order()
        allowed = self.eligible_addresses(excluded, model)
        found = list(islice((address for address in self._order if address in allowed), count))
        return [self._workers[address] for address in found] or _exclude(eligibility.last_resort.workers, excluded)

    def considered(
        self, held: Mapping[str, int], soonest: Sequence[str], excluded: Collection[tuple[str, int]] = (), model: str = ""
    ) -> Sequence[Worker]:
        """Return the workers to compare for a prompt: of a large fleet its deepest holders, then the `soonest`, CONSIDERED in all.

        `held`: tokens of the prompt that each holds, by address. `soonest`: addresses; empty for a small fleet, of which all are compared.
        """
        if not soonest:
            return self.usable(excluded, model)
        allowed = self.eligible_addresses(excluded, model)
        deepest = nlargest(HOLDERS, (address for address in held if address in allowed), key=held.__getitem__)
        addresses = islice(dict.fromkeys(chain(deepest, soonest)), CONSIDERED)
        return [self._workers[address] for address in addresses if address in self._workers]

    def home(self, place: int, allowed: Container[str]) -> Worker | None:
        """Return the worker that every router would choose for a place on the hash ring, among the addresses in `allowed`."""
        address = self._ring.home(place, allowed)
        return self._workers[address] if address is not None else None

    def set_runtime(self, worker: Worker, runtime: str) -> None:
        """Record which engine the worker reports; empty: Fairlead's own."""
        worker.runtime = self.last_runtime = runtime
        if runtime and self._workers.get(worker.address) is worker:
            self._engines.add(worker.address)
        else:
            self._engines.discard(worker.address)

    def engines(self) -> list[Worker]:
        """Return the workers with another engine than Fairlead's."""
        return [self._workers[address] for address in self._engines]

    def record_lacking(self, worker: Worker, path: str) -> None:
        """Record that the worker's engine does not serve the path."""
        self._lacking.setdefault(path, {})[worker.address] = worker.generation

    def lacking(self, path: str) -> frozenset[tuple[str, int]]:
        """Return (address, generation) of the workers whose engine does not serve the path, as far as they were asked."""
        return frozenset(self._lacking[path].items()) if path in self._lacking else frozenset()

    def bound_load_changes(self) -> None:
        """Bring the order up to date after many changes, so that no request has to apply all of them."""
        if len(self._load_changed) >= MAX_LOAD_CHANGES:
            self._update_order()

    def any_usable(self) -> bool:
        """Return whether there is any usable worker, if only as a last resort."""
        return bool(self.usable())

    def any_answering(self) -> bool:
        """Return whether there is any usable worker that has not fallen silent."""
        return bool(self._eligibility("").usable.workers)

    def adapters(self) -> Mapping[str, Adapter]:
        """Return the adapters that the workers report. Without workers, return those of the last ones.

        Requests then wait for new workers (scaled to zero, or all restarting), and do not get a 404 for the model.
        """
        return self._adapters.by_name

    def update_adapters(self, worker: Worker) -> None:
        """Apply the adapters of a worker that reported others, or became ready or unready."""
        if self._workers.get(worker.address) is worker:
            self._adapters.set(worker.address, worker.adapters if worker.ready and not worker.reason else None)

    def unusable_addresses(self, model: str = "") -> frozenset[str]:
        """Return known addresses that the index must not choose: not usable for such a request."""
        return self._eligibility(model).ineligible

    def set_addresses(self, addresses: Collection[str]) -> None:
        """Apply discovery's newest answer. A worker missing from it is removed immediately, and its running streams continue."""
        listed = set(addresses)
        if listed == self._workers.keys():
            return
        added = [address for address in dict.fromkeys(addresses) if address not in self._workers]
        gone = [worker for address, worker in self._workers.items() if address not in listed]
        self._ring.add_all(added)
        self._ring.discard_all({worker.address for worker in gone})
        for address in added:
            self._add(address)
        for worker in gone:
            self._drop(worker)
        self.notify()

    def _drop(self, worker: Worker) -> None:
        address = worker.address
        del self._workers[address]
        self._order.discard(address)
        self._load_changed.discard(address)
        self._engines.discard(address)
        for lacking in self._lacking.values():
            lacking.pop(address, None)
        worker.on_eligibility_change, worker.on_load_change = (lambda: None), (lambda address: None)
        worker.ready = False
        worker.close()
        for eligibility in self._eligibility_by_model.values():
            eligibility.discard(address)
        self._adapters.set(address, None)

    def notify(self) -> None:
        """Wake the requests that wait for a worker."""
        self._change_event.set()
        self._change_event = asyncio.Event()

    async def wait_for_change(self, timeout: float) -> None:
        """Return at the next change, or after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._change_event.wait()
        except TimeoutError:
            pass

    def _add(self, address: str) -> None:
        worker = self._workers[address] = Worker(address, self._clock, self._silence_timeout, self._admin_port)
        worker.on_eligibility_change, worker.on_load_change = partial(self._update_eligibility, worker), self._load_changed.add
        self._update_eligibility(worker)
        self._load_changed.add(address)
        self.on_added(worker)

    def _update_eligibility(self, worker: Worker) -> None:
        for eligibility in self._eligibility_by_model.values():
            eligibility.update(worker)

    def _eligibility(self, model: str) -> Eligibility[Worker]:
        eligibility = self._eligibility_by_model.get(model)
        if eligibility is None:
            eligibility = Eligibility[Worker](model)
            for worker in self._workers.values():
                eligibility.update(worker)
            if len(self._eligibility_by_model) >= MAX_CACHED_MODELS:
                self._eligibility_by_model.pop(next(name for name in self._eligibility_by_model if name))
            self._eligibility_by_model[model] = eligibility
        return eligibility

    def _update_order(self) -> None:
        if self._load_changed:
            now = self._clock()
            for address in self._load_changed:
                self._order.set(address, self._workers[address].ready_key(now))
            self._load_changed.clear()


def _exclude(workers: Sequence[Worker], excluded: Collection[tuple[str, int]]) -> Sequence[Worker]:
    return [worker for worker in workers if (worker.address, worker.generation) not in excluded]


def slices(workers: Iterable[Worker]) -> Iterator[list[Worker]]:
    """Return the workers by address in lists of at most SLICE: work on one takes about a millisecond of the event loop."""
    known = sorted(workers, key=attrgetter("address"))
    return (known[at : at + SLICE] for at in range(0, len(known), SLICE))
