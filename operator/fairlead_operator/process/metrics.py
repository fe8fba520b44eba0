"""The operator's /metrics, in a registry of its own: its own work, and the state of its services.

A standby exports the same families, without services.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlead_operator.api.status import UpdatePhase
from fairlead_operator.kube.tracing import trace_part
from fairlead_operator.kube.workqueue import WorkQueue

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TRUTH = {"True": 1.0, "False": 0.0}


class Metrics:
    """Counters of the process. Values that exist elsewhere are read at scrape time."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._seconds = Histogram(
            "fairlead_operator_reconcile_seconds",
            "Duration of one reconcile of a service, without its time in the queue",
            buckets=_SECONDS,
            registry=registry,
        )
        self._errors = Counter("fairlead_operator_reconcile_errors", "Reconciles that failed, by error", ["error"], registry=registry)
        self._waiting = Gauge("fairlead_operator_reconcile_queue", "Reconciles that wait for a free slot", registry=registry)
        self._requests = Counter(
            "fairlead_operator_api_requests", "Requests of the reconcilers to the API server", ["method", "code"], registry=registry
        )
        self._probes = Counter("fairlead_operator_probes", "Probes of services, by outcome", ["outcome"], registry=registry)
        for outcome in ("failed", "succeeded"):
            self._probes.labels(outcome)  # a counter that begins at 0 shows its first increase
        self._leading = Gauge("fairlead_operator_leading", "1 for the operator that holds the lease", registry=registry)
        self._seconds_since_resync = Gauge(
            "fairlead_operator_seconds_since_resync", "Seconds since the last full resync; 0 on a standby", registry=registry
        )
        self._services = Gauge("fairlead_operator_services", "Services that are being reconciled", registry=registry)

    @asynccontextmanager
    async def measure_reconcile(self, work_queue: WorkQueue, *, urgent: bool) -> AsyncIterator[None]:
        """Wait for a turn, and measure the reconcile. Its errors pass through."""
        self._waiting.inc()
        try:
            with trace_part("queue"):
                await work_queue.acquire(urgent=urgent)
        finally:
            self._waiting.dec()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.observe(time.perf_counter() - began)
            work_queue.release()

    def count_error(self, error: Exception) -> None:
        """Count a reconcile that failed and will be retried."""
        self._errors.labels(type(error).__name__).inc()

    def count_response(self, method: str, code: int) -> None:
        self._requests.labels(method, str(code)).inc()

    def count_probe(self, problem: str) -> None:
        self._probes.labels("failed" if problem else "succeeded").inc()

    def register_sources(
        self,
        leading: Callable[[], bool],
        seconds_since_resync: Callable[[], float],
        reconcilers: Callable[[], int],
        services: Callable[[], Iterable[Mapping[str, Any]]],
    ) -> None:
        """Register the callbacks: whether this process leads, seconds since the last resync, number of reconcilers, service objects."""
        self._leading.set_function(leading)
        self._seconds_since_resync.set_function(lambda: seconds_since_resync() if leading() else 0.0)
        self._services.set_function(reconcilers)
        self.registry.register(_Services(services))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Services(Collector):
    """The status of each service, for alerts and dashboards."""

    def __init__(self, services: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._services = services

    def collect(self) -> Iterable[Metric]:
        labels = ["namespace", "service"]
        conditions = GaugeMetricFamily(
            "fairlead_service_condition", "1 while a condition of the service is True, 0 while it is False", labels=[*labels, "type"]
        )
        workers = GaugeMetricFamily("fairlead_service_workers", "Workers by state: desired, existing, ready", labels=[*labels, "state"])
        updates = GaugeMetricFamily(
            "fairlead_operator_image_update_services",
            "Services by phase of the update to the operator's newest images (status.imageUpdate)",
            labels=["phase"],
        )
        phases = dict.fromkeys(get_args(UpdatePhase), 0)
        for body in self._services():
            metadata, status = body["metadata"], body.get("status") or {}
            if (phase := (status.get("imageUpdate") or {}).get("phase")) in phases:
                phases[phase] += 1
            service_labels = [metadata["namespace"], metadata["name"]]
            for condition in status.get("conditions") or []:
                if condition["status"] in _TRUTH:
                    conditions.add_metric([*service_labels, condition["type"]], _TRUTH[condition["status"]])
            workers.add_metric([*service_labels, "desired"], _desired_workers(body))
            workers.add_metric([*service_labels, "existing"], float(status.get("replicas") or 0))
            workers.add_metric([*service_labels, "ready"], float(status.get("readyReplicas") or 0))
        for phase, count in phases.items():
            updates.add_metric([phase], count)
        return [conditions, workers, updates]


def _desired_workers(body: Mapping[str, Any]) -> float:
    """Return status.desiredReplicas, which includes spec.scaling and the autoscaler; before the first status, spec.replicas."""
    desired = (body.get("status") or {}).get("desiredReplicas")
    return float(body["spec"].get("replicas") or 0) if desired is None else float(desired)
