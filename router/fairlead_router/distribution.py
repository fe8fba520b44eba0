"""Lock-free histogram for one event loop.

prometheus_client's own takes a lock and walks its bounds for each value, which costs 1.5 microseconds.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Distribution(Collector):
    """Histogram that one thread observes and scrapes. `bounds`: upper ends of the buckets, ascending, without infinity."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._documentation, self._bounds = name, documentation, [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(ends, map(float, accumulate(self._counts)), strict=True))
        return [HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)]
