"""What /metrics of the operator says, in a registry of its own: how it does its work, and how its services are.

A standby shows the same families; of services it knows nothing.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlead_operator.kube.workqueue import Lanes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TRUTH = {"True": 1.0, "False": 0.0}


class Metrics:
    """Counters of the process; what they could read elsewhere they read at scrape time."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._seconds = Histogram(
            "fairlead_operator_reconcile_seconds",
            "One pass over a service, without its wait for a lane",
            buckets=_SECONDS,
            registry=registry,
        )
        self._errors = Counter("fairlead_operator_reconcile_errors", "Passes that failed, by error", ["error"], registry=registry)
        self._waiting = Gauge("fairlead_operator_reconcile_queue", "Passes that wait for a lane", registry=registry)
        self._requests = Counter(
            "fairlead_operator_api_requests", "Requests of the loops to the API server", ["method", "code"], registry=registry
        )
        self._probes = Counter("fairlead_operator_probes", "Completions asked of services, by outcome", ["outcome"], registry=registry)
        self._leading = Gauge("fairlead_operator_leading", "1 for the operator that holds the lease", registry=registry)
        self._unheard = Gauge(
            "fairlead_operator_seconds_since_resync", "Since everything was listed last; of the leader", registry=registry
        )
        self._services = Gauge("fairlead_operator_services", "Services with a loop", registry=registry)

    @asynccontextmanager
    async def one_pass(self, lanes: Lanes, *, urgent: bool) -> AsyncIterator[None]:
        """Take a lane for one pass, and measure it. What the pass raises passes through."""
        self._waiting.inc()
        try:
            await lanes.acquire(urgent=urgent)
        finally:
            self._waiting.dec()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.observe(time.perf_counter() - began)
            lanes.release()

    def failed(self, error: Exception) -> None:
        """A pass has ended with this, and is tried again."""
        self._errors.labels(type(error).__name__).inc()

    def answered(self, method: str, code: int) -> None:
        self._requests.labels(method, str(code)).inc()

    def probed(self, problem: str) -> None:
        self._probes.labels("failed" if problem else "succeeded").inc()

    def watch(
        self,
        leading: Callable[[], bool],
        unheard: Callable[[], float],
        loops: Callable[[], int],
        services: Callable[[], Iterable[Mapping[str, Any]]],
    ) -> None:
        """Where to read the rest: whether this process leads, seconds since the last listing, loops, and the services' objects."""
        self._leading.set_function(leading)
        self._unheard.set_function(lambda: unheard() if leading() else 0.0)
        self._services.set_function(loops)
        self.registry.register(_Services(services))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Services(Collector):
    """What the status of each service says, for rules and dashboards."""

    def __init__(self, services: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._services = services

    def collect(self) -> Iterable[Metric]:
        labels = ["namespace", "service"]
        conditions = GaugeMetricFamily(
            "fairlead_service_condition", "1 while a condition of the service is True, 0 while it is False", labels=[*labels, "type"]
        )
        workers = GaugeMetricFamily("fairlead_service_workers", "Workers that are wanted, exist, are ready", labels=[*labels, "state"])
        for body in self._services():
            metadata, status = body["metadata"], body.get("status") or {}
            who = [metadata["namespace"], metadata["name"]]
            for condition in status.get("conditions") or []:
                if condition["status"] in _TRUTH:
                    conditions.add_metric([*who, condition["type"]], _TRUTH[condition["status"]])
            workers.add_metric([*who, "wanted"], _wanted(body))
            workers.add_metric([*who, "existing"], float(status.get("replicas") or 0))
            workers.add_metric([*who, "ready"], float(status.get("readyReplicas") or 0))
        return [conditions, workers]


def _wanted(body: Mapping[str, Any]) -> float:
    """Return status.desiredReplicas, which includes spec.scaling and the autoscaler; before the first status, spec.replicas."""
    desired = (body.get("status") or {}).get("desiredReplicas")
    return float(body["spec"].get("replicas") or 0) if desired is None else float(desired)
