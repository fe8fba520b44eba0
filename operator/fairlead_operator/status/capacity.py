"""`status.reducedSince`, and the fault that follows from it: fewer pods are ready than should be, for too long. Pure.

Most causes are visible in a pod, and reported at once. This one catches every other: capacity is never lost without a fault.
"""

from dataclasses import dataclass
from datetime import datetime

from fairlead_operator import names
from fairlead_operator.causes import Cause
from fairlead_operator.causes.cause import make_cause
from fairlead_operator.objects import format_time, parse_time
from fairlead_operator.observed import Replicas

GRACE = 600.0  # seconds: a worker that was replaced loads 100 GB from a network volume of 250 MB/s in 400 s
SLACK = 60.0  # seconds between the end of a pod and the operator's first look at it


@dataclass(frozen=True)
class Shortfall:
    """Workers or routers that are missing."""

    since: str | None = None  # RFC 3339; None: all are ready
    what: str = ""  # "9 of 10 workers are ready"
    component: str = names.WORKER  # whose pods are missing

    @classmethod
    def of(
        cls, before: str | None, workers: Replicas, routers: Replicas, now: datetime, *, drains: bool, alone: bool = False
    ) -> "Shortfall":
        """Compute it. `before`: the previous status.reducedSince. `drains`: the rollout replaces workers one by one, without a surge.

        `alone`: routers are ready without workers. Others become ready with the first worker.
        """
        replacing = workers.total > workers.updated
        needed = workers.desired - (1 if drains and replacing else 0)
        if workers.ready < needed:
            what, component = f"{workers.ready} of {workers.desired} workers are ready", names.WORKER
        elif (workers.ready or alone) and routers.ready < routers.desired and routers.total <= routers.updated:
            what, component = f"{routers.ready} of {routers.desired} routers are ready", names.ROUTER
        else:
            return cls()
        return cls(before or format_time(now), what, component)

    @property
    def since_seconds(self) -> float | None:
        """Return the time in seconds since the epoch."""
        return parse_time(self.since) if self.since is not None else None

    def find_fault(self, grace: float, now: float, reason: str, pod_cause: Cause | None) -> tuple[Cause | None, float | None]:
        """Return the fault, if `grace` seconds are over, and otherwise when there may be one (seconds since the epoch)."""
        if self.since_seconds is None:
            return None, None
        late_at = self.since_seconds + grace
        if now < late_at:
            return None, late_at
        why = f": {pod_cause.message}" if pod_cause is not None else ""
        do = "See the logs of the pods that are not ready. Delete a pod that makes no progress: another replaces it."
        return make_cause(reason, f"{self.what} since {self.since}{why}", do), None
