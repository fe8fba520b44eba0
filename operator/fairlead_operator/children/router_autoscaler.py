"""The HorizontalPodAutoscaler of the routers. Workers have the operator's own autoscaler (`scaling`)."""

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.kube.kinds import AUTOSCALERS, make_child
from fairlead_operator.objects import Object


def objects(service: InferenceService) -> list[Object]:
    """Return the autoscaler; nothing without `spec.router.autoscaling`.

    The target is an amount of CPU, not a share of the request: one event loop limits a router, whatever it requests.
    """
    autoscaling, name = service.spec.router.autoscaling, names.deployment(service, names.ROUTER)
    if autoscaling is None:
        return []
    target = {"type": "AverageValue", "averageValue": autoscaling.target_cpu}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": service.spec.routing.replicas,
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [{"type": "ContainerResource", "containerResource": {"name": "cpu", "container": "router", "target": target}}],
    }
    return [make_child(service, AUTOSCALERS, name, names.ROUTER, spec=spec)]
