"""Conditions WeightsReady and PodTemplateValid: whether the workers have loaded, and whether their pods are accepted. Pure."""

from collections.abc import Iterable

from fairlead_operator import causes, names
from fairlead_operator.causes import Cause
from fairlead_operator.causes.containers import has_served
from fairlead_operator.objects import Body, component_of, conditions_of
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.status.conditions import Conditions


def set_weights_ready(conditions: Conditions, observed: Observed, workers: Replicas, revision: str) -> None:
    """Set True while every wanted worker has its model in memory; otherwise report what prevents it."""
    pods = [pod for pod in observed.pods if component_of(pod) == names.WORKER and not (pod.get("metadata") or {}).get("deletionTimestamp")]
    found = (causes.find_pod_cause(pod) for pod in sorted(pods, key=lambda pod: _rank(pod, revision)))
    failed = next((cause for cause in found if cause is not None and cause.weights), None)
    loaded = max(workers.ready, sum(map(_has_loaded, pods)))
    if failed is not None:
        conditions.set("WeightsReady", False, failed.reason, failed.message)
    elif workers.desired == 0:
        conditions.set("WeightsReady", False, "ScaledToZero", "No worker is wanted")
    elif loaded >= workers.desired:
        conditions.set("WeightsReady", True, "Loaded", "Every worker has its model")
    else:
        begun = any(_runs(pod) for pod in pods)
        words = f"{loaded} of {workers.desired} workers have their model" if begun else "No worker has begun to load: see Ready"
        conditions.set("WeightsReady", False, "Loading" if begun else "NotStarted", words)


def set_template_valid(conditions: Conditions, obstacle: Cause | None) -> None:
    """Set the condition from `obstacle`, the cause that Ready reports. A refused template is the first obstacle, so no other hides it."""
    if obstacle is not None and obstacle.template:
        conditions.set("PodTemplateValid", False, obstacle.reason, obstacle.message)
    else:
        conditions.set("PodTemplateValid", True, "Accepted", "The API server accepts the workers' pod template")


def _rank(pod: Body, revision: str) -> tuple[bool, str]:
    metadata = pod.get("metadata") or {}
    return (metadata.get("labels") or {}).get(names.REVISION) != revision, metadata.get("name", "")


def _containers(pod: Body) -> Iterable[Body]:
    return (one for one in (pod.get("status") or {}).get("containerStatuses") or [] if one.get("name") in names.SERVING)


def _has_loaded(pod: Body) -> bool:
    """Return whether the pod was ready since its start: the model is in memory, even if the worker drains now."""
    readiness = conditions_of(pod).get("Ready", {})
    return any(has_served(one, readiness) and "running" in (one.get("state") or {}) for one in _containers(pod))


def _runs(pod: Body) -> bool:
    return any("running" in (one.get("state") or {}) or one.get("lastState") for one in _containers(pod))
