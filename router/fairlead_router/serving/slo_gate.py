"""Service classes at one router: checks a request against its class's bounds, and names the workers that it must not go to."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fairlead_index.expected_wait import expected_ttft
from fairlead_index.score import CONSIDERED, SMALL_FLEET
from fairlead_router.errors import ApiError, overloaded
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.service_classes import ServiceClass, ServiceClasses
from fairlead_router.serving.best_effort import has_spare_capacity
from fairlead_router.serving.bounded_admission import BoundedAdmission, BoundedRequest, Verdict, WorkerEstimate
from fairlead_router.serving.promise_ledger import PromiseLedger

Predict = Callable[[RoutingRequest], Mapping[str, int]]
"""Return the prompt's tokens that each worker holds, by address, as far as this router knows now."""
TokensAhead = Callable[[str], float]
"""Return the prompt tokens before a new prompt at a worker as all routers together know it, by its address; 0: not known."""

MOST_SENT_SECONDS: Final = 4.0
"""Most seconds of prefill that count without a report of the worker: what four routers send ahead (`AHEAD_SECONDS`). The index is not
trusted: without a limit, one forged record refuses the requests of all classes at an idle worker."""


@dataclass(frozen=True, slots=True)
class ClassTerms:
    """A request and its service class. `key`: the same when the client sends the request again."""

    service_class: ServiceClass
    request: RoutingRequest
    priority: int
    arrived_at: float
    tenant: str = ""
    key: Hashable = ""


class SloGate:
    """Gate for the requests of service classes. Requests without a class do not pass here."""

    def __init__(
        self,
        table: WorkerTable,
        metrics: Metrics,
        classes: ServiceClasses,
        predict: Predict,
        shared: TokensAhead = lambda address: 0.0,
        clock: Callable[[], float] = monotonic,
        has_score: bool = True,
    ) -> None:
        """`has_score`: the routing policy chooses by the expected time to first token."""
        self._table, self._metrics, self._classes, self._predict, self._shared = table, metrics, classes, predict, shared
        self._clock, self._has_score = clock, has_score
        self._admission = BoundedAdmission()
        metrics.watch(lambda: promise_metrics(self._admission.ledger))

    def check(self, terms: ClassTerms, ahead_tokens: float) -> None:
        """Raise ApiError if no worker can serve the request within its class's bounds. Without workers the request may wait for one.

        `ahead_tokens`: prompt tokens that go before it and were not sent to a worker yet.
        """
        fleet = self._table.usable((), terms.request.model)
        if not fleet or terms.service_class.is_best_effort:
            return
        now, held, considered = self._clock(), self._held(terms), fleet
        if len(fleet) > SMALL_FLEET:
            soonest = self._table.soonest(CONSIDERED, (), terms.request.model)
            considered = self._table.considered(held, [worker.address for worker in soonest], (), terms.request.model)
        estimates, cached = self._estimates(terms, considered, held, now), max(held.values(), default=0)
        verdict = self._admission.decide(_bounded(terms, now, cached), estimates, ahead_tokens, now, len(fleet), used_share(considered))
        if verdict.rejection:
            self._metrics.count_refusal("cached_first" if verdict.rejection == "outbid" else "slo")
            self._metrics.slo_rejected.labels(terms.service_class.name).inc()
            raise _error(terms, cached, verdict)

    def unsuitable(self, terms: ClassTerms) -> set[tuple[str, int]]:
        """Return the workers that the request should not go to, as (address, generation); none if that leaves no worker.

        For best effort these are the workers without spare capacity, else those whose steps are too long for the class. By the time to
        first token the score chooses. With a policy without one, in a small fleet, workers that do not meet its bound are named too.
        """
        fleet, now = self._table.usable((), terms.request.model), self._clock()
        if terms.service_class.is_best_effort:
            suitable = [worker for worker in fleet if self.is_spare(worker, now)]
        elif not self._has_score and terms.service_class.bounds_ttft and len(fleet) <= SMALL_FLEET:
            request, estimates = _bounded(terms, now, 0), self._estimates(terms, fleet, {}, now)
            suitable = [worker for worker, estimate in zip(fleet, estimates, strict=True) if request.can_start(estimate)]
        else:
            suitable = [worker for worker in fleet if worker.load.step_seconds <= terms.service_class.itl_bound]
        if not suitable or len(suitable) == len(fleet):
            return set()
        return {(worker.address, worker.generation) for worker in fleet} - {(worker.address, worker.generation) for worker in suitable}

    def is_spare(self, worker: Worker, now: float) -> bool:
        """Return whether the worker has capacity for a best-effort request."""
        return has_spare_capacity(worker, self._classes.least_itl, now)

    def _held(self, terms: ClassTerms) -> Mapping[str, int]:
        return self._predict(terms.request) if terms.service_class.bounds_ttft else {}

    def _estimates(self, terms: ClassTerms, workers: Sequence[Worker], held: Mapping[str, int], now: float) -> list[WorkerEstimate]:
        """Return the estimates of the workers. `held`: tokens of the prompt that each caches, by address."""
        tokens, shared = terms.request.prompt_tokens, self._shared
        return [estimate_worker(worker, max(1, tokens - held.get(worker.address, 0)), now, shared(worker.address)) for worker in workers]


def promise_metrics(ledger: PromiseLedger) -> Iterator[Metric]:
    """Yield the metrics of promised starts."""
    ended = CounterMetricFamily(
        "fairlead_router_slo_promises",
        "Rejections with a promised start, by outcome: kept, broken (too late when the request returned), expired (it did not return)",
        labels=["outcome"],
    )
    for outcome, count in (("kept", ledger.kept), ("broken", ledger.broken), ("expired", ledger.expired)):
        ended.add_metric([outcome], count)
    yield ended
    yield GaugeMetricFamily("fairlead_router_slo_open_promises", "Promised starts that lie ahead", value=len(ledger))


def estimate_worker(worker: Worker, uncached: int, now: float, shared: float = 0.0) -> WorkerEstimate:
    """Return what the worker can do for a prompt of which it must compute `uncached` tokens.

    `shared`: prompt tokens before it with what other routers have sent since the last report, 0: not known.
    """
    load, ahead = worker.load, worker.tokens_ahead(now)
    ahead = max(ahead, min(shared, ahead + MOST_SENT_SECONDS * load.rate))
    waiting = max(worker.pending_prompts, load.waiting)
    if worker.runs_cached_first and waiting:
        # Cached prompts go first, and have little to compute: a prompt waits for n others of its work, or for all that are ahead.
        ahead = min(ahead, ahead / waiting + waiting * uncached)
    is_idle = not (ahead or load.running or load.waiting or worker.in_flight)
    wait = 0.0 if is_idle else expected_ttft(load, ahead)
    return WorkerEstimate(wait, load.prefill_rate, uncached, load.step_seconds, is_idle)


def used_share(workers: Sequence[Worker]) -> float:
    """Return the share of the requests at the workers that this router has sent, above 0: the other routers use the rest."""
    own = 1 + sum(worker.in_flight for worker in workers)
    return own / max(own, sum(worker.load.running + worker.load.waiting for worker in workers))


def _bounded(terms: ClassTerms, now: float, cached: int) -> BoundedRequest:
    elapsed, tokens = now - terms.arrived_at, terms.request.prompt_tokens
    return BoundedRequest(terms.key, terms.tenant, terms.priority, terms.service_class, elapsed, tokens, cached)


def _error(terms: ClassTerms, cached: int, verdict: Verdict) -> ApiError:
    service_class = terms.service_class
    name, again = service_class.name, f"Try again in {verdict.retry_after} s."
    expected, bound = f"{1000 * verdict.expected:.0f} ms", f"{1000 * verdict.bound:.0f} ms"
    match verdict.rejection:
        case "itl":
            message = f"Class {name}: the steps of all workers take longer than itlMilliseconds, {service_class.itl_milliseconds}."
            return overloaded(f"{message} {again}", verdict.retry_after)
        case "too_long":
            message = f"Class {name}: the first token takes {expected} even on an idle worker, and its bound is {bound}."
            return ApiError(400, f"{message} Send a shorter prompt, or name another class in X-SLO-Class.", code="slo_unattainable")
        case "outbid":
            message = (
                f"Class {name}: {cached} of {terms.request.prompt_tokens} prompt tokens are cached. The service is overloaded, and prompts"
            )
            return overloaded(f"{message} of which a larger share is cached go first. {again}", verdict.retry_after)
        case _:
            message = f"Class {name}: the first token is expected after {expected}, and its bound is {bound}"
            # A request that seems in time is too close to its bound, or would take the place of a promised one.
            message += "." if verdict.expected > verdict.bound else ", less a margin of a tenth and the places promised to others."
            return overloaded(f"{message} {again}", verdict.retry_after)
