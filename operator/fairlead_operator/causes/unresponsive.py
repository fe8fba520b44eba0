"""Detects a controller, scheduler or kubelet that does not act, and pods that stay not ready. Only time shows these. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime

from fairlead_operator import names
from fairlead_operator.causes.cause import Cause, make_cause
from fairlead_operator.causes.containers import has_served
from fairlead_operator.causes.events import probe_message
from fairlead_operator.causes.fields import fields_of_pod
from fairlead_operator.objects import Body, conditions_of, parse_time
from fairlead_operator.observed import PodEvent

DEFAULT_SCHEDULER = "default-scheduler"
GRACE = 60.0  # seconds; controllers and schedulers act within one second, also in clusters with thousands of pods
NODE_GRACE = 120.0  # seconds from a pod's binding to its kubelet's first status
NOT_READY_GRACE = 120.0  # seconds: a worker that catches up, or restarts its engine, is ready again by then

_Late = tuple[float, Cause]  # when the component counts as unresponsive (seconds since the epoch), and the cause from then on


def find_cause(
    deployments: Iterable[Body], pods: Iterable[Body], now: datetime, events: Mapping[str, PodEvent] | None = None
) -> tuple[Cause | None, float | None]:
    """Return the cause, if there is one, and otherwise when there may be one (seconds since the epoch).

    `events`: pod name → its newest relevant Event.
    """
    pods, events = list(pods), events or {}
    found = [
        *(_check_deployment(deployment, pods) for deployment in deployments),
        *map(_check_pod, pods),
        *(_check_readiness(pod, events.get((pod.get("metadata") or {}).get("name", ""))) for pod in pods),
    ]
    late = sorted((one for one in found if one is not None), key=lambda one: one[0])
    if not late:
        return None, None
    at, cause = late[0]
    return (cause, None) if at <= now.timestamp() else (None, at)


def _check_deployment(deployment: Body, pods: list[Body]) -> _Late | None:
    """Return when the controller of a Deployment or LeaderWorkerSet counts as unresponsive; None where nothing is awaited from it."""
    metadata, status = deployment.get("metadata") or {}, deployment.get("status") or {}
    since = last_written_at(metadata)
    if since is None or deployment["spec"].get("paused") or not deployment["spec"].get("replicas"):
        return None
    name, kind = metadata["name"], deployment.get("kind") or "Deployment"
    if int(status.get("observedGeneration") or 0) < int(metadata.get("generation") or 0):
        what = f"{kind} {name}: its controller has not observed it for {GRACE:.0f} s"
    elif not status.get("replicas") and not _has_failed(deployment) and not _has_pods(deployment, pods):
        what = f"{kind} {name}: no pod was created for {GRACE:.0f} s, and no reason is reported"
    else:
        return None
    controller = "kube-controller-manager runs (kubectl -n kube-system get pods)"
    if kind != "Deployment":
        controller = f"{kind}'s own controller runs (kubectl -n lws-system get pods)"
    do = f"See whether {controller}, and kubectl describe {kind.lower()} {name}."
    return since + GRACE, make_cause("ControllerNotResponding", what, do)


def _has_failed(deployment: Body) -> bool:
    return conditions_of(deployment).get("ReplicaFailure", {}).get("status") == "True"


def _has_pods(deployment: Body, pods: list[Body]) -> bool:
    """Return whether any pod exists. Terminating ones count: a canary's Deployment recreates its pods, and waits for their end."""
    selector = deployment["spec"]["selector"]["matchLabels"]
    every = ((pod.get("metadata") or {}).get("labels") or {} for pod in pods)
    return any(selector.items() <= labels.items() and selector.get(names.TRACK) == labels.get(names.TRACK) for labels in every)


def _check_pod(pod: Body) -> _Late | None:
    """Return when the component that must act on a pod next counts as unresponsive; None where none must."""
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    name = metadata.get("name", "?")
    if metadata.get("deletionTimestamp"):
        return _check_termination(name, metadata)
    if status.get("phase", "Pending") != "Pending" or status.get("containerStatuses") or status.get("initContainerStatuses"):
        return None
    scheduled = conditions_of(pod).get("PodScheduled")
    if scheduled is None:
        since, grace, reason = metadata.get("creationTimestamp"), GRACE, "SchedulerNotResponding"
        what = f"pod {name}: no scheduler has handled it for {GRACE:.0f} s"
        do = "See whether kube-scheduler runs (kubectl -n kube-system get pods)."
        if (own := (pod.get("spec") or {}).get("schedulerName", DEFAULT_SCHEDULER)) != DEFAULT_SCHEDULER:
            do = f"See whether the scheduler {own} runs, or correct schedulerName in {fields_of_pod(pod).template}."
    elif scheduled.get("status") == "True":
        since, grace, reason = scheduled.get("lastTransitionTime"), NODE_GRACE, "NodeNotResponding"
        what = f"pod {name}: its kubelet has not started it for {NODE_GRACE:.0f} s"
        do = f"See whether its node is Ready (kubectl get nodes), and kubectl describe pod {name}."
    else:
        return None  # the scheduler has answered: the pod has no node
    return (parse_time(since) + grace, make_cause(reason, what, do)) if since else None


def _check_readiness(pod: Body, event: PodEvent | None) -> _Late | None:
    """Return when a running pod that was ready counts as lost capacity; None for a pod that is ready, starts or leaves."""
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    ready = conditions_of(pod).get("Ready", {})
    containers = [one for one in status.get("containerStatuses") or [] if not one.get("ready")]
    runs = [one for one in containers if (one.get("state") or {}).get("running") is not None and has_served(one, ready)]
    at = parse_time(ready.get("lastTransitionTime"))
    if metadata.get("deletionTimestamp") or ready.get("status") != "False" or not runs or not at:
        return None
    name = metadata.get("name", "?")
    seen = probe_message(event) or "its readiness probe fails"
    what = f"pod {name} runs and is not ready since {ready['lastTransitionTime']}: {seen}"
    do = f"See kubectl logs {name}. If it does not recover, delete the pod: another replaces it."
    return at + NOT_READY_GRACE, make_cause("NotReady", what, do)


def _check_termination(name: str, metadata: Body) -> _Late:
    ends_at = parse_time(metadata["deletionTimestamp"])  # includes the grace period
    do = f"If its node is gone for good: kubectl delete node, or kubectl delete pod {name} --force."
    if finalizers := ", ".join(metadata.get("finalizers") or []):
        do = f"The controllers that set its finalizers ({finalizers}) must remove them."
    what = f"pod {name} should have ended at {metadata['deletionTimestamp']}"
    return ends_at + GRACE, make_cause("StuckTerminating", what, do)


def last_written_at(metadata: Body) -> float | None:
    """Return when any writer last wrote the object: even an annotation makes a new generation that the controller must observe."""
    times = [metadata.get("creationTimestamp"), *(entry.get("time") for entry in metadata.get("managedFields") or [])]
    return max(map(parse_time, times)) or None
