"""Names an autoscaler that targets one of our Deployments, and what it should target instead. Pure."""

from collections.abc import Iterable

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes.cause import Cause, make_cause
from fairlead_operator.observed import FieldConflict

REASON = "ReplicasConflict"
_KNOWN = {"kube-controller-manager": "a HorizontalPodAutoscaler (field manager kube-controller-manager)", "keda-operator": "KEDA"}


def find_cause(service: InferenceService, field_conflicts: Iterable[FieldConflict]) -> tuple[Cause | None, float | None]:
    """Return the fault, if there is one, and until when it lasts (seconds since the epoch). Its message does not change meanwhile."""
    found = sorted(field_conflicts, key=lambda one: (one.component != names.WORKER, one.name, one.manager))
    if not found:
        return None, None
    one = found[0]
    writer = _KNOWN.get(one.manager, f"field manager {one.manager!r}")
    what = f"{writer} keeps setting the replicas of {one.kind} {one.name}; the operator restores them each time"
    return make_cause(REASON, what, _advice(service, one)), max(each.until for each in found)


def _advice(service: InferenceService, one: FieldConflict) -> str:
    look = f"Find it with kubectl get hpa,scaledobject -n {service.namespace}" if one.manager in _KNOWN else "Find that writer"
    if one.component != names.WORKER:
        return f"{look} and stop it: spec.routing.replicas says how many routers there are, and spec.router.autoscaling scales them."
    if service.spec.scaling is not None and service.spec.scaling.target is not None:
        return f"{look} and stop it: with spec.scaling.target the operator sizes this service."
    if one.manager in _KNOWN:
        reference = f"{{apiVersion: fairlead.dev/v1alpha1, kind: InferenceService, name: {service.name}}}"
        return f"{look} and point it at the InferenceService: scaleTargetRef: {reference}."
    return f"{look} and scale the InferenceService instead: kubectl scale inferenceservices.fairlead.dev {service.name} --replicas=N."
