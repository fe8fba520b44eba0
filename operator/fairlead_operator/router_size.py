"""The number of routers: the spec's, or with `spec.router.autoscaling` the one that a HorizontalPodAutoscaler chose. Pure."""

from fairlead_operator.api import InferenceService
from fairlead_operator.kube.difference import replicas_set_by
from fairlead_operator.objects import Body


def router_replicas(service: InferenceService, live: Body | None) -> int:
    """Return the desired number of routers. `live`: their Deployment, which holds the autoscaler's choice."""
    fewest, autoscaling = service.spec.routing.replicas, service.spec.router.autoscaling
    if autoscaling is None or live is None:
        return fewest
    present = (live.get("spec") or {}).get("replicas")
    return max(fewest, min(autoscaling.max_replicas, fewest if present is None else int(present)))


def replicas_to_apply(service: InferenceService, live: Body | None) -> int | None:
    """Return the number to send; None: the autoscaler owns the field, and a value of ours could undo its newest choice.

    The operator owns it until the autoscaler writes it first: Kubernetes resets a field that its only owner leaves out. A number out of
    bounds is corrected, since an autoscaler leaves a Deployment of 0 replicas alone.
    """
    wanted = router_replicas(service, live)
    if service.spec.router.autoscaling is None or live is None or not replicas_set_by(live["metadata"]):
        return wanted
    return None if (live.get("spec") or {}).get("replicas") == wanted else wanted
