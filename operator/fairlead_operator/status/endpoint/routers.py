"""`status.routers`: how many routers there are, and what their autoscaler reports. Pure."""

from fairlead_operator.api import InferenceService
from fairlead_operator.api.status import RoutersStatus
from fairlead_operator.kube.kinds import AUTOSCALERS
from fairlead_operator.objects import conditions_of
from fairlead_operator.observed import Observed, Replicas


def build_status(service: InferenceService, observed: Observed, routers: Replicas) -> RoutersStatus:
    return RoutersStatus(
        desired_replicas=routers.desired,
        replicas=routers.total,
        ready_replicas=routers.ready,
        message=_describe_autoscaler(service, observed)[:256],
    )


def _describe_autoscaler(service: InferenceService, observed: Observed) -> str:
    """Return why the number of routers does not follow their load; empty: it does, or no autoscaler is wanted."""
    if service.spec.router.autoscaling is None:
        return ""
    if AUTOSCALERS.kind not in observed.served:
        return f"spec.router.autoscaling needs {AUTOSCALERS.api_version}, which this cluster does not serve: the number stays"
    conditions = conditions_of(observed.optional_objects.get(AUTOSCALERS.kind))
    for type_ in ("AbleToScale", "ScalingActive"):
        if (conditions.get(type_) or {}).get("status") == "False":
            return f"{conditions[type_].get('reason', type_)}: {conditions[type_].get('message', '')}"
    return ""
