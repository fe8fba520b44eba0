"""The operator's autoscaler in the simulator: its own code, on what modelled routers report."""

from collections.abc import Callable

from fairlead.simulate.fleet import Fleet, InflightRequest, InflightRequests
from fairlead.simulate.router import Router
from fairlead_operator.api.scaling import Scaling
from fairlead_operator.observed import Recommendation
from fairlead_operator.scaling.costs import worker_cost
from fairlead_operator.scaling.decision import decide, history_seconds, recent_recommendations
from fairlead_operator.scaling.demand import Demand, RouterReport, WorkerReport
from fairlead_operator.scaling.recommendation import WorkerPool, recommend
from fairlead_router.serving.demand import Arrivals, CacheHits

PERIOD = 5.0
"""Seconds between two polls of a router, as the operator's BUSY_PERIOD."""


class DemandMeter:
    """What one router measures of its requests, as the product's `Demand`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.arrivals, self.hits = Arrivals(clock), CacheHits(clock)
        self.answer_seconds = 0.0
        self._clock, self._last = clock, clock()

    def record_arrival(self, tokens: int) -> None:
        self.arrivals.add(tokens)
        self._last = self._clock()

    def record_answer(self, flight: InflightRequest, cached: int) -> None:
        self.hits.add(str(flight.pod), cached, flight.request.prompt_tokens)

    def record_end(self, flight: InflightRequest) -> None:
        seconds = self._clock() - flight.first_token_at
        self.answer_seconds += (seconds - self.answer_seconds) / (16 if self.answer_seconds else 1)
        self._last = self._clock()

    def report(self, router: Router, fleet: Fleet, inflight: InflightRequests) -> RouterReport:
        """Return what the router would answer to the operator, now."""
        now, queued = self._clock(), router.queue.total
        requests, tokens = self.arrivals.rates()
        active = sum(inflight.count) + queued.count
        shares, workers = fleet.table.unique_shares(), []
        for number in fleet.usable:
            pod = fleet.pods[number]
            load = pod.load(now)[1]
            workers.append(
                WorkerReport(
                    pod=str(number),
                    address=str(number),
                    usable=True,
                    running=load.running,
                    waiting=load.waiting,
                    backlog_tokens=load.backlog_tokens,
                    pending_tokens=int(inflight.pending[number]),
                    step_seconds=load.step_seconds,
                    max_running=pod.model.max_running,
                    pages_used=load.pages_total - load.pages_free,
                    pages_total=load.pages_total,
                    hit_tokens=self.hits.tokens_of(str(number)),
                    unique_share=shares.get(str(number)),
                )
            )
        rates = [fleet.pods[number].load(now)[1].prefill_rate for number in fleet.usable]
        return RouterReport(
            idle_seconds=0.0 if active else now - self._last,
            active=active,
            queued=queued.count,
            queued_tokens=queued.tokens,
            requests_per_second=requests,
            prompt_tokens_per_second=tokens,
            cached_share=self.hits.share,
            answer_seconds=self.answer_seconds,
            prefill_rate=sum(rates) / len(rates) if rates else 0.0,
            workers=tuple(workers),
        )


class Autoscaler:
    """The operator: `size` decides the number of pods, and `least_valuable` which one goes."""

    def __init__(self, scaling: Scaling, start_seconds: float) -> None:
        assert scaling.target is not None, "the autoscaler has a target"
        self.scaling, self._target, self._start_seconds = scaling, scaling.target.seconds, start_seconds
        self._recommendations: list[Recommendation] = []
        self._reports: list[RouterReport] = []

    def size(self, reports: list[RouterReport], desired: int, ready: int, now: float) -> int:
        """Return the number of pods to have from now on."""
        self._reports = reports
        pool = WorkerPool(desired, ready, self._start_seconds)
        self._recommendations.append(recommend(Demand.of(reports), pool, self._target, now, self._recommendations))
        self._recommendations[:] = recent_recommendations(self._recommendations, history_seconds(self.scaling, pool))
        return decide(self.scaling, desired, self._recommendations).desired

    def least_valuable(self, pods: list[int]) -> int:
        """Return the pod whose deletion costs least."""
        seen = {pod: [worker for report in self._reports for worker in report.workers if worker.pod == str(pod)] for pod in pods}
        return min(pods, key=lambda pod: (worker_cost(seen[pod]) if seen[pod] else 0, -pod))
