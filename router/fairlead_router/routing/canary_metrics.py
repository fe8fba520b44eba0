"""Prometheus metrics of the canary and the stable side, labelled with the canary's revision."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlead_common.canary_split import SplitReport

_LABELS = ["side", "revision"]
QUANTILES = (0.5, 0.9)


class CanaryMetrics(Collector):
    """Collector of the canary's report. It exports nothing while there is no canary, and counts from the canary's first appearance."""

    def __init__(self, report: Callable[[], SplitReport]) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        report = self._report()
        weight = GaugeMetricFamily("fairlead_router_canary_weight", "Percent of requests routed to the canary", labels=["revision"])
        requests = CounterMetricFamily("fairlead_router_side_requests", "Attempts at canary and stable pods", labels=_LABELS)
        errors = CounterMetricFamily(
            "fairlead_router_side_errors", "Failed attempts: 5xx, no answer, or a truncated answer", labels=_LABELS
        )
        ttft = GaugeMetricFamily(
            "fairlead_router_side_ttft_seconds",
            "Seconds from sending a request to the first byte of its answer",
            labels=[*_LABELS, "quantile"],
        )
        if report.revision:
            weight.add_metric([report.revision], report.weight)
            for name, side in (("canary", report.canary), ("stable", report.stable)):
                requests.add_metric([name, report.revision], side.requests)
                errors.add_metric([name, report.revision], side.errors)
                for share in QUANTILES if side.ttft.count else ():
                    ttft.add_metric([name, report.revision, str(share)], side.ttft.quantile(share))
        return [weight, requests, errors, ttft]
