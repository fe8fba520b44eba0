"""Manifests and cluster objects for tests."""

from typing import Any

from fairlead_operator.api import InferenceService
from fairlead_operator.api.engine import Engine
from fairlead_operator.api.fields import changes_of
from fairlead_operator.settings import Settings

SETTINGS = Settings(worker_image="worker:1", router_image="control:1", redis_url="redis://redis:6379", default_gpus=1)


def manifest(name: str = "qwen", namespace: str = "default", /, **spec: Any) -> dict[str, Any]:
    """A service with only a model, and the fields of `spec`."""
    model = {"uri": "hf://Qwen/Qwen3-8B", **spec.pop("model", {})}
    return {
        "apiVersion": "fairlead.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": model, **spec},
    }


def service(name: str = "qwen", /, *, generation: int = 1, status: Any = None, **spec: Any) -> InferenceService:
    body = manifest(name, **spec)
    body["metadata"] |= {"uid": "uid-1", "generation": generation}
    return InferenceService.parse(body | ({"status": status} if status else {}))


def unsupported_setting(field: str) -> dict[str, Any]:
    """`spec.engine` with another value than the default of a field that other engines do not have (`UNSUPPORTED`)."""
    parent, _, last = field.rpartition(".")
    value = {last: dict(changes_of(Engine))[field][-1]}
    return ({parent: value} if parent else value) | ({"tensorParallel": 2} if field == "nodes" else {})


def deployment(
    component: str, wanted: int, *, ready: int | None = None, updated: int | None = None, conditions: Any = ()
) -> dict[str, Any]:
    """A Deployment whose controller is up to date."""
    return {
        "metadata": {"generation": 1, "labels": {"app.kubernetes.io/component": component}},
        "spec": {"replicas": wanted, "selector": {"matchLabels": {"app.kubernetes.io/component": component}}},
        "status": {
            "observedGeneration": 1,
            "replicas": wanted,
            "readyReplicas": wanted if ready is None else ready,
            "availableReplicas": wanted if ready is None else ready,
            "updatedReplicas": wanted if updated is None else updated,
            "conditions": list(conditions),
        },
    }


def pod(name: str = "qwen-worker-1", component: str = "worker", revision: str = "", **status: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component, "app.kubernetes.io/instance": "qwen", "fairlead.dev/revision": revision}
    return {"kind": "Pod", "metadata": {"name": name, "labels": labels}, "status": status}


def container(state: dict[str, Any], last: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": "worker", "image": "worker:1", "ready": False, "restartCount": 0, "state": state, "lastState": last or {}, **more}
