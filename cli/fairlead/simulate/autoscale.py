"""The operator's autoscaler in the simulator: its own code, on what the modelled routers report."""

from collections.abc import Sequence

from fairlead_operator.api.scaling import Scaling
from fairlead_operator.observed import Recommendation
from fairlead_operator.scaling.costs import worker_cost
from fairlead_operator.scaling.decision import decide, history_seconds, recent_recommendations
from fairlead_operator.scaling.demand import Demand, RouterReport
from fairlead_operator.scaling.recommendation import WorkerPool, recommend

PERIOD = 5.0
"""Seconds between two polls of a router, as the operator's BUSY_PERIOD."""


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

    def least_valuable(self, pods: list[int], addresses: Sequence[str]) -> int:
        """Return the pod whose deletion costs least. `addresses`: by the pod's number."""
        seen = {pod: [worker for report in self._reports for worker in report.workers if worker.address == addresses[pod]] for pod in pods}
        return min(pods, key=lambda pod: (worker_cost(seen[pod]) if seen[pod] else 0, -pod))
