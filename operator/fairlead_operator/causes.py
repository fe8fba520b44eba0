"""Why a pod does not serve, lifted from what Kubernetes knows, in a form that does not flap.

A crashing container alternates between waiting, running and terminated every few seconds. A pod's last failure stays its cause
until the pod has been ready again, so that what people see is the failure and not the moment at which they looked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_operator import names
from fairlead_operator.observed import Body

LONGEST = 1024  # characters of a message
_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"}
_CONTAINER = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreStartHookError", "PostStartHookError"}


@dataclass(frozen=True)
class Cause:
    """One word for machines, a sentence for people, and whether it is a fault (rather than work under way)."""

    reason: str
    message: str
    fault: bool


def of_pods(pods: Iterable[Body], component: str, revision: str) -> Cause | None:
    """The worst cause among the pods of one component; those of the wanted revision first, for it is their spec that people edit."""
    found = []
    for pod in pods:
        metadata = pod.get("metadata") or {}
        labels = metadata.get("labels") or {}
        if labels.get(names.COMPONENT) != component or metadata.get("deletionTimestamp"):
            continue
        cause = of_pod(pod)
        if cause is not None:
            found.append((not cause.fault, labels.get(names.REVISION) != revision, metadata.get("name", ""), cause))
    return min(found, key=lambda item: item[:3])[3] if found else None


def of_pod(pod: Body) -> Cause | None:
    """What keeps this pod from being ready; None for a ready one."""
    status = pod.get("status") or {}
    name = (pod.get("metadata") or {}).get("name", "?")
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    if conditions.get("Ready", {}).get("status") == "True":
        return None
    if status.get("phase") in ("Failed", "Succeeded"):
        return Cause(
            status.get("reason") or "PodFailed",
            _short(f"pod {name} has ended: {status.get('message') or status.get('phase')}"),
            fault=False,
        )
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _unschedulable(name, scheduled)
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for container in containers:
        cause = _of_container(name, container, conditions.get("Ready", {}))
        if cause is not None:
            return cause
    return Cause("Starting", f"pod {name} is being started", fault=False)


def _unschedulable(name: str, condition: Mapping[str, Any]) -> Cause:
    message = str(condition.get("message") or "no node takes it")
    if "nvidia.com/gpu" in message:
        message += " (to run on CPUs, set spec.resources.gpus: 0)"
    return Cause("FailedScheduling", _short(f"pod {name} has no node: {message}"), fault=True)


def _of_container(pod: str, container: Mapping[str, Any], readiness: Mapping[str, Any]) -> Cause | None:
    """None for a container that is well, or has done its work."""
    if container.get("ready"):
        return None
    state, last = container.get("state") or {}, container.get("lastState") or {}
    waiting, terminated = state.get("waiting") or {}, state.get("terminated")
    reason = waiting.get("reason", "")
    if reason in _IMAGE:
        # ErrImagePull and ImagePullBackOff alternate; the detail of the first stands behind the prefix of the second.
        detail = str(waiting.get("message") or reason).rsplit("ErrImagePull: ", 1)[-1]
        return Cause("ImagePullBackOff", _short(f"pod {pod}: image {container.get('image', '?')}: {detail}"), fault=True)
    if reason in _CONTAINER:
        return Cause(reason, _short(f"pod {pod}: {waiting.get('message') or reason}"), fault=True)
    if terminated and terminated.get("exitCode") == 0 and not last.get("terminated"):
        return None  # an init container that is done
    served = _has_served(container, readiness)
    ended = terminated or (None if served else last.get("terminated"))
    if ended and (ended.get("exitCode") != 0 or reason == "CrashLoopBackOff"):
        return _crashed(pod, container, ended, reason)
    if state.get("running") is not None:
        if served:
            return Cause("NotReady", f"pod {pod} runs and does not take requests: it is draining or has lost its engine", fault=False)
        return Cause("Loading", f"pod {pod} is loading the model", fault=False)
    return Cause("Starting", f"pod {pod} is being started", fault=False)


def _has_served(container: Mapping[str, Any], readiness: Mapping[str, Any]) -> bool:
    """It was ready since its present start: only then did its pod's readiness change after that. Passing the startup probe says less."""
    since, changed = ((container.get("state") or {}).get("running") or {}).get("startedAt"), readiness.get("lastTransitionTime")
    return str(changed) > str(since) if since and changed else bool(container.get("started"))


def _crashed(pod: str, container: Mapping[str, Any], ended: Mapping[str, Any], waiting: str) -> Cause:
    """An OutOfMemory kill is named; otherwise the second end, or a back-off, makes a crash loop (restartCount never goes back)."""
    looping = waiting == "CrashLoopBackOff" or int(container.get("restartCount") or 0) >= 2
    reason = "OOMKilled" if ended.get("reason") == "OOMKilled" else "CrashLoopBackOff" if looping else "Crashed"
    code = ended.get("exitCode")
    said = last_line(str(ended.get("message") or ""))
    if ended.get("reason") == "OOMKilled":
        said = said or "it used more memory than spec.resources.memory allows"
    return Cause(reason, _short(f"pod {pod}: {container.get('name')} exited with code {code}: {said or 'it left no message'}"), fault=True)


def last_line(text: str) -> str:
    """The last line that says something: of a traceback, the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _short(message: str) -> str:
    return message if len(message) <= LONGEST else message[: LONGEST - 1] + "…"
