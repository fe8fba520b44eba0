"""Whether there is capacity for one more worker: nodes, from the scheduler's messages on pending pods; a quota; and a volume that only one
node may attach, from the Events of pods."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_operator import names
from fairlead_operator.objects import Body, component_of, conditions_of, parse_time
from fairlead_operator.observed import PodEvent

# What a worker that leaves its node frees, in the messages of kube-scheduler's plugins (NodeResourcesFit, NodePorts, InterPodAffinity,
# PodTopologySpread, NodeVolumeLimits, VolumeRestrictions, DynamicResources). Without any of them, draining a worker would gain nothing:
# no node fits in any case.
_FREED_BY_DRAINING = (
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
    """New workers that have no node or no volume, or that may not be created."""

    since: float  # seconds since the epoch, of the first of them
    words: str  # the message of the scheduler, of the quota or of the volume's controller
    drain_helps: bool  # a worker that leaves frees what is missing


def find_pending(pods: Iterable[Body], deployment: Body, wanted: int, events: Mapping[str, PodEvent]) -> PendingWorkers | None:
    """Return the pending workers; None: all have a node. `pods`: the running workers of the desired revision.

    `events`: pod name → its newest relevant Event.
    """
    found = [one for one in (_unscheduled(pod) or _unattached(pod, events) for pod in pods) if one is not None]
    if (quota := _over_quota(deployment, wanted)) is not None:
        found.append(quota)
    if not found:
        return None
    first = min(found, key=lambda one: one.since)
    helped = [one for one in found if one.drain_helps]
    return PendingWorkers(first.since, (helped or [first])[0].words, bool(helped))


def _unscheduled(pod: Body) -> PendingWorkers | None:
    scheduled = conditions_of(pod).get("PodScheduled", {})
    if scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    words = str(scheduled.get("message") or "")
    fits = words.partition("preemption:")[0].lower()
    return PendingWorkers(_since(pod), words, not fits or any(given in fits for given in _FREED_BY_DRAINING))


def _since(pod: Body) -> float:
    """Return when the scheduler last decided about the pod."""
    scheduled = conditions_of(pod).get("PodScheduled", {})
    return parse_time(scheduled.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp"))


def _unattached(pod: Body, events: Mapping[str, PodEvent]) -> PendingWorkers | None:
    """Return a pod whose ReadWriteOnce volume is attached to another worker's node: no time makes it free while that worker stays."""
    event = events.get(pod["metadata"].get("name", ""))
    if event is None or not is_multi_attach(event.message):
        return None
    return PendingWorkers(_since(pod), event.message, True)


def is_multi_attach(message: str) -> bool:
    return "Multi-Attach error" in message


def _over_quota(deployment: Body, wanted: int) -> PendingWorkers | None:
    """Return a refusal by the namespace's quota, which counts terminating pods until they are gone."""
    failure = conditions_of(deployment).get("ReplicaFailure", {})
    words = str(failure.get("message") or "")
    is_short = int((deployment.get("status") or {}).get("updatedReplicas") or 0) < wanted
    if not is_short or failure.get("status") != "True" or "exceeded quota" not in words:
        return None
    return PendingWorkers(parse_time(failure.get("lastTransitionTime")), words, True)


class DepartureTracker:
    """Tracks when a worker last left, as far as this process knows: the scheduler needs a moment to use the freed capacity.

    This is the only state of rollouts that children do not show. A new process counts from its start, so lost state makes a wait longer and
    never shorter.
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
