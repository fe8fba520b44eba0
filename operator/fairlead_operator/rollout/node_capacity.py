"""Is there room for one more worker? Told by the scheduler's words on pods that wait for a node, and by the quota that refuses one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_operator import names
from fairlead_operator.objects import Body, component_of, parse_time

# What a worker that leaves its node gives back, in the words of kube-scheduler's plugins (NodeResourcesFit, NodePorts, InterPodAffinity,
# PodTopologySpread, NodeVolumeLimits, VolumeRestrictions, DynamicResources). Where none of them stands, a drained worker would be lost
# for nothing: no node fits, whoever leaves.
_GIVEN_BACK = (
    "insufficient",
    "too many pods",
    "free ports",
    "anti-affinity",
    "topology spread",
    "volume count",
    "readwriteoncepod",
    "allocate all claims",
)


@dataclass(frozen=True)
class PendingWorkers:
    """New workers that have no node, or may not be made."""

    since: float  # seconds since the epoch: the first of them
    words: str  # the scheduler's, or the quota's
    drain_helps: bool  # a worker that goes gives back what is missing


def find_pending(pods: Iterable[Body], deployment: Body, wanted: int) -> PendingWorkers | None:
    """`pods`: the living workers of the wanted revision, which the Deployment makes. None: all of them have a node."""
    found = [one for one in (_unscheduled(pod) for pod in pods) if one is not None]
    quota = _over_quota(deployment, wanted)
    if quota is not None:
        found.append(quota)
    if not found:
        return None
    first = min(found, key=lambda one: one.since)
    helped = [one for one in found if one.drain_helps]
    return PendingWorkers(first.since, (helped or [first])[0].words, bool(helped))


def _unscheduled(pod: Body) -> PendingWorkers | None:
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False" and condition.get("reason") == "Unschedulable":
            since = condition.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
            words = str(condition.get("message") or "")
            fits = words.partition("preemption:")[0].lower()
            return PendingWorkers(parse_time(since), words, not fits or any(given in fits for given in _GIVEN_BACK))
    return None


def _over_quota(deployment: Body, wanted: int) -> PendingWorkers | None:
    """The namespace's quota lets no further pod be made: it counts those that go until they are gone."""
    status = deployment.get("status") or {}
    if int(status.get("updatedReplicas") or 0) >= wanted:
        return None
    for condition in status.get("conditions") or []:
        words = str(condition.get("message") or "")
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True" and "exceeded quota" in words:
            return PendingWorkers(parse_time(condition.get("lastTransitionTime")), words, True)
    return None


class DepartureTracker:
    """Since when no worker has left, as far as this process has seen: the scheduler needs a moment to use what one gave back.

    The one thing about rollouts that children do not tell. A process that has just started counts from its start, so that forgetting
    makes a wait longer and never shorter.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._held: frozenset[str] = frozenset()

    def since(self, pods: Iterable[Mapping[str, Any]], now: float) -> float:
        held = frozenset(str(pod["metadata"].get("uid")) for pod in pods if component_of(pod) in names.pod_components(names.WORKER))
        if self._held - held:
            self._since = now
        self._held = held
        return self._since
