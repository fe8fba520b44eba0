"""What the pods of workers and routers have in common."""

from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import security
from fairlead_operator.objects import Object

GRACE_MARGIN = 15  # seconds after the drain timeout in which a process that overran it is still asked, not killed


def downward(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def probe(path: str, *, period: int, failures: int, timeout: int = 5) -> Object:
    """Probes use the admin port: clients that fill the other one must not have the pod restarted."""
    return {"httpGet": {"path": path, "port": "admin"}, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": timeout}


def liveness(failures: int) -> Object:
    """A process that no longer answers does not drain either: it is not left alone for the whole drain timeout, which may be two hours."""
    return {**probe("/health", period=10, failures=failures), "terminationGracePeriodSeconds": GRACE_MARGIN}


def pod_spec(service: InferenceService, component: str, container: Object, volumes: list[Object]) -> Object:
    """A PodSpec around one container: restricted, spread over nodes, no API token."""
    secrets = [{"name": secret.name} for secret in service.spec.image_pull_secrets]
    return {
        **({"imagePullSecrets": secrets} if secrets else {}),
        "serviceAccountName": service.name,
        "automountServiceAccountToken": False,
        # A Service called "fairlead" would put FAIRLEAD_PORT=tcp://… into every pod, and our flags read FAIRLEAD_*.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": service.spec.rollout.drain_timeout_seconds + GRACE_MARGIN,
        "securityContext": security.pod(),
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


def labelled(service: InferenceService, component: str, revision: str, template: Object) -> Object:
    """The template with the labels by which its pods are found; the user's own stay."""
    metadata = template.get("metadata", {})
    labels = {**metadata.get("labels", {}), **names.selector(service, component), names.REVISION: revision}
    return {**template, "metadata": {**metadata, "labels": labels}}


def deployment(
    service: InferenceService,
    component: str,
    *,
    replicas: int,
    template: Object,
    strategy: dict[str, Any],
    settle: int = 0,
    paused: bool = False,
) -> Object:
    """`settle`: seconds that a new pod must have been ready before a rollout takes the next one away. `paused` is ours even when it is
    False: one that somebody has paused by hand would take no edit any more, and not say why."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(service, names.deployment(service, component), component),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 5,
            "minReadySeconds": settle,
            "progressDeadlineSeconds": service.spec.rollout.progress_deadline_seconds,
            "paused": paused,
            "selector": {"matchLabels": names.selector(service, component)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": strategy},
            "template": template,
        },
    }


def disruption_budget(service: InferenceService, component: str, max_unavailable: int) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(service, names.deployment(service, component), component),
        "spec": {
            "maxUnavailable": max_unavailable,
            "selector": {"matchLabels": names.selector(service, component)},
            # A pod that never became ready serves nobody: it must not keep a node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
