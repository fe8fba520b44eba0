"""Both sides of a split in /metrics, by the canary's revision."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlead_common.canary_split import SplitReport

_LABELS = ["side", "revision"]
QUANTILES = (0.5, 0.9)


class CanaryMetrics(Collector):
    """Read at scrape time. Nothing while there is no canary; counted from when the router learned of it."""

    def __init__(self, report: Callable[[], SplitReport]) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        report = self._report()
        weight = GaugeMetricFamily("fairlead_router_canary_weight", "Percent of the requests that are for the canary", labels=["revision"])
        requests = CounterMetricFamily("fairlead_router_side_requests", "Attempts at the canary's pods and at the others", labels=_LABELS)
        errors = CounterMetricFamily("fairlead_router_side_errors", "Of them: 5xx, no answer, an answer that broke off", labels=_LABELS)
        ttft = GaugeMetricFamily("fairlead_router_side_ttft_seconds", "From sending to the first byte", labels=[*_LABELS, "quantile"])
        if report.revision:
            weight.add_metric([report.revision], report.weight)
            for name, side in (("canary", report.canary), ("stable", report.stable)):
                requests.add_metric([name, report.revision], side.requests)
                errors.add_metric([name, report.revision], side.errors)
                for share in QUANTILES if side.ttft.count else ():
                    ttft.add_metric([name, report.revision, str(share)], side.ttft.quantile(share))
        return [weight, requests, errors, ttft]
