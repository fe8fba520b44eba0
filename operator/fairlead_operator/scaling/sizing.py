"""Puts the autoscaler's decision and the schedules into the spec from which objects and status are built. Pure."""

from dataclasses import replace
from datetime import datetime

from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.api.status import ScalingStatus
from fairlead_operator.observed import Observed, SizeDecision
from fairlead_operator.scaling.decision import decide
from fairlead_operator.scaling.schedules import NO_MINIMUM, ScheduledMinimum, find_minimum, raise_minimum
from fairlead_operator.scaling.state import current_size

Size = tuple[InferenceService, SizeDecision | None, ScheduledMinimum]


def apply_size(service: InferenceService, observed: Observed, now: datetime) -> Size:
    """Return the service with the number of workers of this moment, the autoscaler's decision if it decides, and the scheduled minimum."""
    scaling = service.spec.scaling
    if scaling is None:
        return service, None, NO_MINIMUM
    minimum = find_minimum(scaling.schedules, now)
    bounds, current = raise_minimum(scaling, minimum), current_size(observed)
    if scaling.target is None:
        return _with_replicas(service, bounds.within(service.spec.replicas)), None, minimum
    decision = decide(bounds, current, observed.recommendations)
    if decision.reason and current is not None and decide(scaling, current, observed.recommendations).desired < decision.desired:
        decision = replace(decision, reason=f"schedule {minimum.schedule}: {current} -> {decision.desired}")
    return _with_replicas(service, decision.desired), decision, minimum


def _with_replicas(service: InferenceService, replicas: int) -> InferenceService:
    """Return the service with that number. `spec.scaling` stays: its minReplicas says whether routers must wake workers."""
    return replace(service, spec=service.spec.model_copy(update={"replicas": replicas}))


def add_scaling_status(
    status: ServiceStatus, service: InferenceService, observed: Observed, decision: SizeDecision | None, minimum: ScheduledMinimum
) -> ServiceStatus:
    """Return the status with `status.scaling`. The reason of the last change stays until the next one."""
    scaling = service.spec.scaling
    if decision is None:
        if scaling is None or not scaling.schedules:
            return status
        message = f"schedule {minimum.schedule}: at least {minimum.replicas} workers" if minimum.schedule else "no schedule is in effect"
        made = ScalingStatus(desired_replicas=status.desired_replicas, message=message[:256], schedule=minimum.schedule)
        return status.model_copy(update={"scaling": made})
    before = service.status.scaling
    reason = decision.reason
    if not reason and observed.decision is not None and observed.decision.desired == decision.desired:
        reason = observed.decision.reason
    elif not reason and before is not None and before.desired_replicas == decision.desired:
        reason = before.message
    made = ScalingStatus(desired_replicas=decision.desired, message=reason[:256], schedule=minimum.schedule)
    return status.model_copy(update={"scaling": made})
