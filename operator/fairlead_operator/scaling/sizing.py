"""The size that the autoscaler decides, put where everything else finds it: in the spec that objects and status are made from. Pure."""

from dataclasses import replace

from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.api.status import ScalingStatus
from fairlead_operator.observed import Decision, Observed
from fairlead_operator.scaling.decision import decided
from fairlead_operator.scaling.standing import current_size


def sized(service: InferenceService, observed: Observed) -> tuple[InferenceService, Decision | None]:
    """The service with the number of workers decided. As it is, and None, where `spec.replicas` says it."""
    if service.spec.scaling is None or service.spec.scaling.target is None:
        return service, None
    decision = decided(service.spec.scaling, current_size(observed), observed.needs)
    return replace(service, spec=service.spec.model_copy(update={"replicas": decision.wanted})), decision


def with_size(status: ServiceStatus, service: InferenceService, observed: Observed, decision: Decision | None) -> ServiceStatus:
    """With `status.scaling`: the reason of the last change stays until the next one."""
    if decision is None:
        return status
    before = service.status.scaling
    reason = decision.reason
    if not reason and observed.decision is not None and observed.decision.wanted == decision.wanted:
        reason = observed.decision.reason
    elif not reason and before is not None and before.desired_replicas == decision.wanted:
        reason = before.message
    return status.model_copy(update={"scaling": ScalingStatus(desired_replicas=decision.wanted, message=reason[:256])})
