"""Finds why a pod does not serve, in a form that does not flap.

A crashing container alternates between waiting, running and terminated every few seconds. A pod's last failure stays its cause until the
pod has been ready again, so that people see the failure and not the state of one moment.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fairlead_operator import names
from fairlead_operator.causes import scheduling
from fairlead_operator.causes.cause import Cause, make_cause, truncate
from fairlead_operator.causes.containers import find_container_cause
from fairlead_operator.causes.events import find_event_cause, make_node_lost_cause
from fairlead_operator.causes.fields import Fields, fields_of_pod
from fairlead_operator.objects import Body, conditions_of, has_ended, parse_time
from fairlead_operator.observed import PodEvent

_LOST = ("NodeLost", "NodeUnreachable")
_EVICTED = "Kubernetes replaces it. Free the scarce resource on the node, or request it in {resources} so that the scheduler counts it."


def find_worst_cause(
    pods: Iterable[Body], component: str, revision: str, events: Mapping[str, PodEvent] | None = None, ended_after: float | None = None
) -> Cause | None:
    """Return the worst cause among the pods of one component. Pods of the desired revision come first, because users edit their spec.

    `events`: pod name → its newest relevant Event. `ended_after`: only pods that ended later count among those that have ended (seconds
    since the epoch). They stay listed for days, so None ranks them behind every other pod.
    """
    found = []
    for pod in pods:
        metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
        labels, name = metadata.get("labels") or {}, metadata.get("name", "")
        leaving = metadata.get("deletionTimestamp") and status.get("reason") not in _LOST
        if labels.get(names.COMPONENT) not in names.pod_components(component) or leaving:
            continue
        cause = find_pod_cause(pod, (events or {}).get(name))
        if cause is not None:
            ended = has_ended(pod)
            if ended and ended_after is not None and _ended_at(pod) < ended_after:
                continue
            hidden = ended and ended_after is None
            found.append((hidden, not cause.fault, ended, labels.get(names.REVISION) != revision, name, cause))
    return min(found, key=lambda item: item[:5])[5] if found else None


def find_pod_cause(pod: Body, event: PodEvent | None = None) -> Cause | None:
    """Return what keeps this pod from being ready; None for a ready one."""
    status = pod.get("status") or {}
    name, fields = (pod.get("metadata") or {}).get("name", "?"), fields_of_pod(pod)
    conditions = conditions_of(pod)
    if status.get("reason") in _LOST:
        return make_node_lost_cause(name)
    if conditions.get("Ready", {}).get("status") == "True":
        return None
    if status.get("phase") in ("Failed", "Succeeded"):
        return _ended(name, status, fields)
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return scheduling.find_cause(name, scheduled.get("reason", ""), str(scheduled.get("message") or ""), fields)
    disrupted = conditions.get("DisruptionTarget", {})
    if disrupted.get("status") == "True":
        why = disrupted.get("message") or disrupted.get("reason") or "no reason is given"
        return make_cause("Disrupted", f"pod {name} is being evicted: {why}", "Kubernetes replaces it.", fault=False)
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    if _node_stopped_reporting(status, conditions.get("Ready")):
        return make_node_lost_cause(name)
    early = find_event_cause(name, event, fields) if event is not None and not any(_has_run(one) for one in containers) else None
    for container in containers:
        cause = find_container_cause(name, container, fields, conditions.get("Ready"), event)
        if cause is not None:
            return early if early is not None and not cause.fault else cause
    return early or Cause("Starting", f"pod {name} is starting", fault=False)


def _ended_at(pod: Body) -> float:
    """Return when a pod ended, in seconds since the epoch: the last time in its status, else its creation."""
    status = pod.get("status") or {}
    states = ((one.get("state") or {}).get("terminated") or {} for one in status.get("containerStatuses") or [])
    times = [parse_time(one.get("finishedAt")) for one in states]
    times += [parse_time(one.get("lastTransitionTime")) for one in conditions_of(pod).values()]
    return max(times, default=0.0) or parse_time((pod.get("metadata") or {}).get("creationTimestamp"))


def _node_stopped_reporting(status: Body, ready: Mapping[str, Any] | None) -> bool:
    """Return whether the node controller, and not the kubelet, set the pod to not ready.

    All containers were ready in the kubelet's last report. The node controller gives no reason, and a kubelet always does.
    """
    containers = status.get("containerStatuses") or []
    return bool(containers) and all(one.get("ready") for one in containers) and ready is not None and not ready.get("reason")


def _has_run(container: Mapping[str, Any]) -> bool:
    """Return whether the container has run: then its volumes are mounted."""
    state, last = container.get("state") or {}, container.get("lastState") or {}
    return "running" in state or "terminated" in state or bool(last)


def _ended(name: str, status: Body, fields: Fields) -> Cause:
    reason, words = status.get("reason") or "PodFailed", status.get("message") or status.get("phase")
    if reason == "Evicted":
        return make_cause(reason, f"pod {name} was evicted: {words}", _EVICTED.format(**fields.words))
    if reason.startswith("OutOf") or reason in ("UnexpectedAdmissionError", "NodeAffinity", "NodePorts"):
        do = "The kubelet rejected it after the scheduler had chosen the node: see the node's device plugin, or cordon the node."
        return make_cause(reason, f"pod {name} was rejected by its node: {words}", do)
    return Cause(reason, truncate(f"pod {name} has ended: {words}"), fault=False)
