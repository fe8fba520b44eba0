"""The state of a service's workers, for recommendations and for the hint that routers give to waiting clients."""

import math
from dataclasses import dataclass
from typing import Any

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.scaling import Scaling
from fairlead_operator.objects import Body, component_of, has_ended, parse_time, ready_at
from fairlead_operator.observed import Observed
from fairlead_operator.scaling.recommendation import WorkerPool
from fairlead_operator.scaling.schedules import NO_MINIMUM, ScheduledMinimum, raise_minimum

START_SECONDS, MIN_START_SECONDS, MAX_START_SECONDS = 60.0, 5.0, 900.0
"""Seconds: assumed where no worker has shown it yet, and the bounds of what is measured."""


@dataclass(frozen=True)
class ScalingState:
    """The workers of a service with `spec.scaling.target`."""

    scaling: Scaling
    pool: WorkerPool
    began: float  # seconds since the epoch: creation of the oldest worker that is not ready; 0: there is none
    reason: str  # why it is not ready, in one word
    has_fault: bool = False  # waiting alone will not make it ready

    def hint(self, now: float) -> dict[str, Any]:
        """Return a router's query parameters: the progress of the starting workers."""
        starting = max(0, self.pool.desired - self.pool.ready)
        seconds = round(now - self.began) if self.began and starting else 0
        reason, advancing = (self.reason, int(not self.has_fault)) if starting else ("", 0)
        return {"wanted": self.pool.desired, "starting": starting, "seconds": max(0, seconds), "reason": reason, "advancing": advancing}


def current_size(observed: Observed) -> int | None:
    """Return the autoscaler's state: the size of the workers' Deployment; None before it exists."""
    deployment = observed.deployments.get(names.WORKER)
    if deployment is None:
        return None
    return int(deployment["spec"].get("replicas", 1))


def scaling_state(
    service: InferenceService, observed: Observed, revision: str = "", minimum: ScheduledMinimum = NO_MINIMUM
) -> ScalingState | None:
    """Return the state; None where others decide the size, or without a Deployment. Canary pods do not count.

    `minimum`: what a schedule asks for now.
    """
    size = current_size(observed)
    if service.spec.scaling is None or service.spec.scaling.target is None or size is None:
        return None
    deployment = observed.deployments[names.WORKER]
    ready = int((deployment.get("status") or {}).get("readyReplicas") or 0)
    workers = [pod for pod in observed.stable.pods if component_of(pod) == names.WORKER]
    pods = [pod for pod in workers if not (pod["metadata"].get("deletionTimestamp") or has_ended(pod))]
    started = [taken for pod in pods if (taken := _start_seconds(pod)) is not None]
    took = max(MIN_START_SECONDS, min(MAX_START_SECONDS, min(started))) if started else START_SECONDS
    began = min((parse_time(pod["metadata"].get("creationTimestamp")) for pod in pods if ready_at(pod) is None), default=0.0)
    since = min((at for pod in pods if (at := ready_at(pod)) is not None), default=math.inf)
    cause = causes.find_worst_cause(workers, names.WORKER, revision)
    reason, has_fault = (cause.reason, cause.fault) if cause is not None else ("", False)
    return ScalingState(raise_minimum(service.spec.scaling, minimum), WorkerPool(size, ready, took, since), began, reason, has_fault)


def _start_seconds(pod: Body) -> float | None:
    ready, made = ready_at(pod), parse_time(pod["metadata"].get("creationTimestamp"))
    return ready - made if ready and made else None
