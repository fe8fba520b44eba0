"""Detects a controller, scheduler or kubelet that does not act. A stopped one reports nothing, so only time shows it. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from fairlead_operator import names
from fairlead_operator.causes.cause import Cause, make_cause

Body = Mapping[str, Any]
GRACE = 60.0  # seconds; controllers and schedulers act within one second, also in clusters with thousands of pods
NODE_GRACE = 120.0  # seconds from a pod's binding to its kubelet's first status

_Late = tuple[float, Cause]  # when the component counts as unresponsive (seconds since the epoch), and the cause from then on


def find(deployments: Iterable[Body], pods: Iterable[Body], now: datetime) -> tuple[Cause | None, float | None]:
    """Return the cause, if there is one, and otherwise when there may be one (seconds since the epoch)."""
    pods = list(pods)
    late = [one for deployment in deployments for one in _of_deployment(deployment, pods)]
    late += [one for pod in pods for one in _of_pod(pod)]
    due = [cause for at, cause in sorted(late, key=lambda one: one[0]) if at <= now.timestamp()]
    return (due[0], None) if due else (None, min((at for at, _ in late), default=None))


def _of_deployment(deployment: Body, pods: list[Body]) -> list[_Late]:
    metadata, status = deployment.get("metadata") or {}, deployment.get("status") or {}
    since = last_written_at(metadata)
    if since is None or deployment["spec"].get("paused") or not deployment["spec"].get("replicas"):
        return []
    name = metadata["name"]
    kind = deployment.get("kind") or "Deployment"
    component = "kube-controller-manager runs (kubectl -n kube-system get pods)"
    component = component if kind == "Deployment" else f"{kind}'s own controller runs (kubectl -n lws-system get pods)"
    do = f"See whether {component}, and kubectl describe {kind.lower()} {name}."
    if int(status.get("observedGeneration") or 0) < int(metadata.get("generation") or 0):
        what = f"{kind} {name}: its controller has not observed it for {GRACE:.0f} s"
    elif not status.get("replicas") and not _failed(status) and not _has_pods(deployment, pods):
        what = f"{kind} {name}: no pod was created for {GRACE:.0f} s, and no reason is reported"
    else:
        return []
    return [(since + GRACE, make_cause("ControllerNotResponding", what, do))]


def _failed(status: Body) -> bool:
    return any(one["type"] == "ReplicaFailure" and one["status"] == "True" for one in status.get("conditions") or [])


def _has_pods(deployment: Body, pods: list[Body]) -> bool:
    """Return whether any pod exists. Terminating ones count: a canary's Deployment recreates its pods, and waits for their end."""
    wanted = deployment["spec"]["selector"]["matchLabels"]
    every = ((pod.get("metadata") or {}).get("labels") or {} for pod in pods)
    return any(wanted.items() <= labels.items() and wanted.get(names.TRACK) == labels.get(names.TRACK) for labels in every)


def _of_pod(pod: Body) -> list[_Late]:
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    name = metadata.get("name", "?")
    ends_at = _seconds(metadata.get("deletionTimestamp"))  # includes the grace period
    if ends_at is not None:
        held = ", ".join(metadata.get("finalizers") or [])
        do = (
            f"The controllers that set its finalizers ({held}) must remove them."
            if held
            else f"If its node is gone for good: kubectl delete node, or kubectl delete pod {name} --force."
        )
        return [(ends_at + GRACE, make_cause("StuckTerminating", f"pod {name} should have ended at {metadata['deletionTimestamp']}", do))]
    if status.get("phase", "Pending") != "Pending" or status.get("containerStatuses") or status.get("initContainerStatuses"):
        return []
    scheduled = next((one for one in status.get("conditions") or [] if one["type"] == "PodScheduled"), None)
    made = _seconds(metadata.get("creationTimestamp"))
    if scheduled is None:
        do = "See whether kube-scheduler runs (kubectl -n kube-system get pods)."
        return (
            []
            if made is None
            else [(made + GRACE, make_cause("SchedulerNotResponding", f"pod {name}: no scheduler has handled it for {GRACE:.0f} s", do))]
        )
    bound = _seconds(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None
    do = f"See kubectl describe pod {name}, and whether its node is Ready (kubectl get nodes)."
    return (
        []
        if bound is None
        else [
            (bound + NODE_GRACE, make_cause("NodeNotResponding", f"pod {name}: its kubelet has not started it for {NODE_GRACE:.0f} s", do))
        ]
    )


def last_written_at(metadata: Body) -> float | None:
    """Return when any writer last wrote the object: even an annotation makes a new generation that the controller must observe."""
    times = [metadata.get("creationTimestamp"), *(entry.get("time") for entry in metadata.get("managedFields") or [])]
    return max((at for at in map(_seconds, times) if at is not None), default=None)


def _seconds(text: Any) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None
