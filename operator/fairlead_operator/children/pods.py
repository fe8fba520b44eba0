"""Parts that the pods of workers and routers share."""

from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.pod_template import PodTemplate
from fairlead_operator.children import security
from fairlead_operator.kube.merge import merge
from fairlead_operator.objects import Object
from fairlead_operator.settings import Settings

CONTROL_RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "4", "memory": "4Gi"}}
"""Of routers and the batch server. Quotas may require limits. These are above what docs/operate/size.md counts for any router."""
GRACE_MARGIN = 15  # seconds after the drain timeout before the kubelet kills a process that exceeded it


def downward(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def tracing(settings: Settings) -> list[Object]:
    """Return the standard variable that makes workers and routers send traces. Images of earlier releases ignore it."""
    return [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": settings.otlp_endpoint}] if settings.otlp_endpoint else []


def probe(path: str, *, period: int, failures: int, timeout: int = 5) -> Object:
    """Return a probe of the admin port: clients that exhaust the inference port must not cause a restart."""
    return {"httpGet": {"path": path, "port": "admin"}, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": timeout}


def liveness(failures: int) -> Object:
    """Return the liveness probe. A hung process does not drain, so its grace period is short: the drain timeout can be two hours."""
    return {**probe("/health", period=10, failures=failures), "terminationGracePeriodSeconds": GRACE_MARGIN}


def pod_spec(service: InferenceService, settings: Settings, component: str, container: Object, volumes: list[Object]) -> Object:
    """Return a PodSpec around one container: restricted, spread over nodes, without an API token."""
    own = [secret.name for secret in service.spec.image_pull_secrets]
    secrets = [{"name": name} for name in own or settings.image_pull_secrets]
    return {
        **({"imagePullSecrets": secrets} if secrets else {}),
        "serviceAccountName": service.name,
        "automountServiceAccountToken": False,
        # A Service named "fairlead" would set FAIRLEAD_PORT=tcp://… in every pod, and flags are also read from FAIRLEAD_*.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": service.spec.rollout.drain_timeout_seconds + GRACE_MARGIN,
        "securityContext": security.pod_context(assigned=settings.assigned_user_ids),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",  # soft: one node with two replicas is better than one replica
                "labelSelector": {"matchLabels": names.selector(service, component)},
            }
        ],
        "containers": [container],
        "volumes": volumes,
    }


def finish(service: InferenceService, component: str, revision: str, template: Object, theirs: PodTemplate | None) -> Object:
    """Return the template with that of the user merged over it, and the labels of the selectors, which the user cannot change."""
    if theirs is not None:
        template = _order_init_containers(merge(template, theirs.to_manifest()), theirs)
    metadata = template.get("metadata", {})
    labels = {**metadata.get("labels", {}), **names.selector(service, component), names.REVISION: revision}
    return {**template, "metadata": {**metadata, "labels": labels}}


def _order_init_containers(template: Object, theirs: PodTemplate) -> Object:
    """Return the template with its init containers in the user's order, before ours that the user does not list.

    Ours is the engine of runtime VLLM and SGLang, a sidecar: a download must end before it starts.
    """
    wanted = [one.get("name") for one in theirs.spec.get("initContainers") or []]
    if not wanted:
        return template
    merged = template["spec"]["initContainers"]
    place = {name: index for index, name in enumerate(wanted)}
    ordered = sorted(merged, key=lambda one: place.get(one["name"], len(wanted)))
    return {**template, "spec": {**template["spec"], "initContainers": ordered}}


def deployment(
    service: InferenceService,
    component: str,
    *,
    replicas: int | None,
    template: Object,
    strategy: dict[str, Any],
    min_ready_seconds: int = 0,
    paused: bool = False,
) -> Object:
    """Return a Deployment.

    `replicas`: None leaves them to an autoscaler. `min_ready_seconds`: seconds that a new pod must be ready before the rollout replaces the
    next one.

    The operator owns `paused` even when it is False: a Deployment that a user paused would ignore edits without a visible reason.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(service, names.deployment(service, component), component),
        "spec": {
            **({} if replicas is None else {"replicas": replicas}),
            "revisionHistoryLimit": 5,
            "minReadySeconds": min_ready_seconds,
            "progressDeadlineSeconds": service.spec.rollout.progress_deadline_seconds,
            "paused": paused,
            "selector": {"matchLabels": names.selector(service, component)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": strategy},
            "template": template,
        },
    }


def disruption_budget(service: InferenceService, component: str, bound: Object) -> Object:
    """Return a PodDisruptionBudget. `bound`: maxUnavailable or minAvailable."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(service, names.deployment(service, component), component),
        "spec": {
            **bound,
            "selector": {"matchLabels": names.selector(service, component)},
            # A pod that never became ready serves no requests, so it must not block a node drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
