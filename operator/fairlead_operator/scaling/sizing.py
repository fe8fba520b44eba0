"""Puts the autoscaler's decision into the spec from which objects and status are built. Pure."""

from dataclasses import replace

from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.api.status import ScalingStatus
from fairlead_operator.observed import Observed, SizeDecision
from fairlead_operator.scaling.decision import decide
from fairlead_operator.scaling.state import current_size


def apply_size(service: InferenceService, observed: Observed) -> tuple[InferenceService, SizeDecision | None]:
    """Return the service with the decided number of workers; unchanged and None, where `spec.replicas` decides."""
    if service.spec.scaling is None or service.spec.scaling.target is None:
        return service, None
    decision = decide(service.spec.scaling, current_size(observed), observed.recommendations)
    return replace(service, spec=service.spec.model_copy(update={"replicas": decision.desired})), decision


def add_scaling_status(
    status: ServiceStatus, service: InferenceService, observed: Observed, decision: SizeDecision | None
) -> ServiceStatus:
    """Return the status with `status.scaling`. The reason of the last change stays until the next one."""
    if decision is None:
        return status
    before = service.status.scaling
    reason = decision.reason
    if not reason and observed.decision is not None and observed.decision.desired == decision.desired:
        reason = observed.decision.reason
    elif not reason and before is not None and before.desired_replicas == decision.desired:
        reason = before.message
    return status.model_copy(update={"scaling": ScalingStatus(desired_replicas=decision.desired, message=reason[:256])})
