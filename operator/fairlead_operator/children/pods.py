"""Parts that the pods of workers, routers, the batch server and downloads share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.pod_template import PodTemplate
from fairlead_operator.kube.kinds import BUDGETS, DEPLOYMENTS, make_child
from fairlead_operator.kube.merge import merge
from fairlead_operator.objects import Object
from fairlead_operator.settings import Settings

CONTROL_RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "4", "memory": "4Gi"}}
"""Of routers and the batch server. Quotas may require limits. These are above what docs/operate/size.md counts for any router."""
GRACE_MARGIN = 15  # seconds after the drain timeout before the kubelet kills a process that exceeded it
USER = 65532  # "nonroot" in distroless images; the images of this project use it too


@dataclass(frozen=True)
class Mounted:
    """A volume of a pod, and the folder where its containers see it. The kubelet does not update files that are mounted with subPath."""

    name: str
    folder: str | PurePosixPath
    source: Object
    read_only: bool = True

    @property
    def volume(self) -> Object:
        return {"name": self.name, **self.source}

    @property
    def mount(self) -> Object:
        return {"name": self.name, "mountPath": str(self.folder)} | ({"readOnly": True} if self.read_only else {})


TMP = Mounted("tmp", "/tmp", {"emptyDir": {}}, read_only=False)
SHM = Mounted("shm", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}, read_only=False)
"""torch and NCCL use it; its default size is 64 MiB."""
TERMINATION_LOG = "/dev/termination-log"


def secret_source(name: str, keys: Mapping[str, str] | None = None, *, optional: bool = False) -> Object:
    """Return the source of a volume with a Secret's keys as files. `keys`: only these, key → file. `optional`: it may not exist yet."""
    items = {"items": [{"key": key, "path": file} for key, file in keys.items()]} if keys is not None else {}
    return {"secret": {"secretName": name, **items, **({"optional": True} if optional else {}), "defaultMode": 0o440}}


def optional_config(name: str) -> Object:
    """Return the source of a volume with a ConfigMap, which may not exist yet: a pod starts before, and gets the files later."""
    return {"configMap": {"name": name, "optional": True, "defaultMode": 0o444}}


def command_line(flags: Mapping[str, object]) -> list[str]:
    """Return flags as arguments. None and an empty text leave a flag out: images of earlier releases may not have it."""
    return [f"--{flag}={value}" for flag, value in flags.items() if value not in (None, "")]


def downward(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def secret_variable(variable: str, secret: str, key: str, *, optional: bool = False) -> Object:
    reference = {"name": secret, "key": key} | ({"optional": True} if optional else {})
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def tracing(settings: Settings) -> list[Object]:
    """Return the standard variable that makes workers and routers send traces. Images of earlier releases ignore it."""
    return [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": settings.otlp_endpoint}] if settings.otlp_endpoint else []


def make_container(
    settings: Settings, name: str, image: str, command: Iterable[str], args: list[str], mounted: Iterable[Mounted], **more: Any
) -> Object:
    """Return a container of the restricted Pod Security profile. `more`: its further fields."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": list(command),
        "args": args,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [one.mount for one in mounted],
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the last log lines reach the status of the pod
        **more,
    }


def probes(*, startup_period: int, liveness_failures: int) -> Object:
    """Return the probes of the admin port: clients that exhaust the inference port must not cause a restart.

    A hung process does not drain, so its grace period is short: the drain timeout can be two hours.
    """
    return {
        "startupProbe": _probe("/health", startup_period, 60),
        "readinessProbe": _probe("/ready", 2, 2),
        "livenessProbe": {**_probe("/health", 10, liveness_failures), "terminationGracePeriodSeconds": GRACE_MARGIN},
    }


def _probe(path: str, period: int, failures: int) -> Object:
    return {"httpGet": {"path": path, "port": "admin"}, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": 5}


SERVING: Object = {
    "ports": [
        {"name": "http", "containerPort": names.WORKER_PORT, "protocol": "TCP"},
        {"name": "admin", "containerPort": names.WORKER_ADMIN_PORT, "protocol": "TCP"},
    ],
    # Until the process first answers, with a cold disk. A load has no fixed limit (kubeai#179): /health is 200 while it makes progress. The
    # worker ends a stalled load and logs the step.
    **probes(startup_period=5, liveness_failures=6),
    "terminationMessagePath": TERMINATION_LOG,
}
"""Of the container that serves a worker's paths: the worker, or an engine's agent."""


def pod_spec(service: InferenceService, settings: Settings, component: str, container: Object, mounted: Iterable[Mounted]) -> Object:
    """Return a PodSpec around one container: restricted, spread over nodes, without an API token.

    It names no user where the cluster assigns them, as OpenShift's SCC restricted-v2 does.
    """
    own = [secret.name for secret in service.spec.image_pull_secrets]
    secrets = [{"name": name} for name in own or settings.image_pull_secrets]
    return {
        **({"imagePullSecrets": secrets} if secrets else {}),
        "serviceAccountName": service.name,
        "automountServiceAccountToken": False,
        # A Service named "fairlead" would set FAIRLEAD_PORT=tcp://… in every pod, and flags are also read from FAIRLEAD_*.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": service.spec.rollout.drain_timeout_seconds + GRACE_MARGIN,
        "securityContext": {
            "runAsNonRoot": True,
            **({} if settings.assigned_user_ids else {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}),
            "fsGroupChangePolicy": "OnRootMismatch",  # otherwise every start changes the owner of all files of a model cache
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",  # soft: one node with two replicas is better than one replica
                "labelSelector": {"matchLabels": names.selector(service, component)},
            }
        ],
        "containers": [container],
        "volumes": [one.volume for one in mounted],
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
    rolling: dict[str, Any] | None,
    min_ready_seconds: int = 0,
    paused: bool = False,
) -> Object:
    """Return a Deployment.

    `replicas`: None leaves them to an autoscaler. `rolling`: the bounds within which pods are replaced; None: all at once.
    `min_ready_seconds`: seconds that a new pod must be ready before the rollout replaces the next one.

    The operator owns `paused` even when it is False: a Deployment that a user paused would ignore edits without a visible reason.
    """
    spec = {
        **({} if replicas is None else {"replicas": replicas}),
        "revisionHistoryLimit": 5,
        "minReadySeconds": min_ready_seconds,
        "progressDeadlineSeconds": service.spec.rollout.progress_deadline_seconds,
        "paused": paused,
        "selector": {"matchLabels": names.selector(service, component)},
        "strategy": {"type": "Recreate"} if rolling is None else {"type": "RollingUpdate", "rollingUpdate": rolling},
        "template": template,
    }
    return make_child(service, DEPLOYMENTS, names.deployment(service, component), component, spec=spec)


def disruption_budget(service: InferenceService, component: str, bound: Object) -> Object:
    """Return a PodDisruptionBudget. `bound`: maxUnavailable or minAvailable."""
    spec = {
        **bound,
        "selector": {"matchLabels": names.selector(service, component)},
        # A pod that never became ready serves no requests, so it must not block a node drain.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return make_child(service, BUDGETS, names.deployment(service, component), component, spec=spec)
