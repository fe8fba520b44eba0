"""Causes that only Events report: volumes that cannot be mounted, pod sandboxes, probes, and lost nodes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fairlead_operator.causes.cause import Cause, find_advice, make_cause
from fairlead_operator.causes.fields import Fields
from fairlead_operator.observed import PodEvent

MOUNT = {"FailedMount", "FailedAttachVolume", "FailedMapVolume"}
PROBE = {"Unhealthy"}
DEVICE_CLAIM = {"FailedResourceClaimCreation"}
CREATION = {"FailedCreate"}  # of a Job
RELEVANT_REASONS = {*MOUNT, *PROBE, *DEVICE_CLAIM, *CREATION, "FailedCreatePodSandBox", "NetworkNotReady", "NodeNotReady"}

_MOUNT_ADVICE = (
    (r'persistentvolumeclaim "([^"]+)" not found', "Create the PersistentVolumeClaim {0}, or correct its name in {claim}."),
    (r'secret "([^"]+)" not found', "Create the Secret {0} in this namespace: the kubelet then mounts it."),
    (r'configmap "([^"]+)" not found', "Create the ConfigMap {0} in this namespace."),
    (r"references non-existent secret key: (\S+)", "Put the key {0} into that Secret."),
    (
        r"Multi-Attach error",
        "The volume is attached to another node: use a ReadWriteMany claim, or wait until the old pod has gone. For one worker, "
        "spec.rollout.strategy Auto or DrainFirst ends the old pod first.",
    ),
    (r"hostPath type check failed", "The path does not exist on that node: create it, or choose nodes that have it."),
    (r"permission denied|access denied", "The storage refuses this node: check its credentials and exports."),
    (r"timed out waiting", "The storage does not answer: see the CSI driver's pods and kubectl describe pvc."),
)


def newest_relevant(events: Sequence[Mapping[str, Any]]) -> PodEvent | None:
    """Return the newest relevant Event. A readiness probe's Event comes after any other, because it ends no container."""
    telling = [event for event in events if event.get("reason") in RELEVANT_REASONS]
    found = max(telling, key=lambda event: (not _of_readiness(event), _time(event)), default=None)
    return PodEvent(found["reason"], str(found.get("message") or "")) if found is not None else None


def _of_readiness(event: Mapping[str, Any]) -> bool:
    return event["reason"] in PROBE and str(event.get("message")).startswith("Readiness")


def _time(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


def find_event_cause(pod: str, event: PodEvent, fields: Fields) -> Cause | None:
    """Return the cause for a pod whose containers do not run yet; None where the Event gives no reason."""
    if event.reason in MOUNT:
        do = next(iter(find_advice(_MOUNT_ADVICE, event.message, fields.words)), f"See kubectl describe pod {pod}.")
        return make_cause("FailedMount", f"pod {pod} waits for a volume: {_without_ids(event.message)}", do)
    if event.reason in DEVICE_CLAIM:
        do = "Create the ResourceClaimTemplate that spec.resources.resourceClaims names, in this namespace, or correct the name."
        return make_cause(event.reason, f"pod {pod} has no device claim: {_without_ids(event.message)}", do)
    if event.reason in ("FailedCreatePodSandBox", "NetworkNotReady"):
        return make_cause(
            event.reason,
            f"pod {pod}: {_without_ids(event.message)}",
            "The node's container runtime or network plugin fails: see its pods and the kubelet's log.",
        )
    return make_node_lost_cause(pod) if event.reason == "NodeNotReady" else None


def make_node_lost_cause(pod: str) -> Cause:
    do = "Kubernetes replaces the pod after about 5 minutes. If the node is gone for good, delete it: kubectl delete node."
    return make_cause("NodeLost", f"the node of pod {pod} does not answer", do)


def probe_message(event: PodEvent | None) -> str:
    """Return the probe's message as a clause; empty: there is no Event of a probe."""
    return _without_ids(event.message) if event is not None and event.reason in PROBE else ""


def _without_ids(message: str) -> str:
    """Remove ids and times, which would make each repetition a different message."""
    message = re.sub(r"\b[0-9a-f]{64}\b|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", "…", message)
    return " ".join(message.split())
