"""Events of stuck pods, and of Jobs without a pod: nothing else reports what keeps a volume from being mounted, or a Job's pod away.

Events are not watched (a cluster creates hundreds per second). Events are listed only for pods that have been stuck for a while, for a few
pods at a time, and only as long as they are: a healthy service costs nothing.
"""

import logging
from collections.abc import Callable, Iterable

from fairlead_operator.causes.containers import KILLED, has_served
from fairlead_operator.causes.events import newest_relevant
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.objects import Body, conditions_of, has_ended, has_no_pod
from fairlead_operator.observed import PodEvent
from fairlead_operator.polling.periodic import PeriodicTask

log = logging.getLogger(__name__)
STUCK_AFTER = 10.0  # seconds that a pod may take before its Events are listed
PERIOD = 30.0  # seconds between two polls
MAX_PODS = 3  # polled pods of one service: the others are stuck for the same reason
_CREATING = ("ContainerCreating", "PodInitializing")


class PodEventPoller:
    """`seen`: pod or Job → its newest relevant Event. Calls `on_change()` when it changes."""

    def __init__(self, cluster: Cluster, on_change: Callable[[], None]) -> None:
        self._cluster, self._on_change = cluster, on_change
        self.seen: dict[str, PodEvent] = {}
        self._stuck: list[tuple[str, str, str]] = []  # kind, namespace and name
        self._task = PeriodicTask(self._poll)

    def follow(self, pods: Iterable[Body], jobs: Iterable[Body] = ()) -> None:
        """Poll the stuck ones of these: all pods and Jobs of the service."""
        self._stuck = sorted(("Pod", pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in pods if is_stuck(pod))[:MAX_PODS]
        self._stuck += [("Job", job["metadata"]["namespace"], job["metadata"]["name"]) for job in jobs if has_no_pod(job)]
        names = {name for _, _, name in self._stuck}
        self.seen = {name: event for name, event in self.seen.items() if name in names}
        if self._stuck:
            self._task.start(f"events of {self._stuck[0][2]}", STUCK_AFTER)
        else:
            self.stop()

    def stop(self) -> None:
        self._task.stop()
        self.seen = {}

    async def _poll(self) -> float:
        before = dict(self.seen)
        for kind, namespace, name in list(self._stuck):
            try:
                found = newest_relevant(await self._cluster.events_of(kind, namespace, name))
            except ApiError as refusal:
                log.info("events of %s %s/%s: %s", kind.lower(), namespace, name, refusal)
                continue
            if found is not None and any(name == one for _, _, one in self._stuck):
                self.seen[name] = found
        if self.seen != before:
            self._on_change()
        return PERIOD


def is_stuck(pod: Body) -> bool:
    """Return whether the status does not say why the pod does not serve.

    It has a node and no container runs, or a probe may have ended its container or may keep it from being ready.
    """
    metadata, status = pod["metadata"], pod.get("status") or {}
    readiness, scheduled = (conditions_of(pod).get(type_, {}) for type_ in ("Ready", "PodScheduled"))
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    if metadata.get("deletionTimestamp") or readiness.get("status") == "True" or scheduled.get("status") == "False" or has_ended(pod):
        return False
    states = [(one, one.get("state") or {}, (one.get("lastState") or {}).get("terminated") or {}) for one in containers]
    if not any("running" in state or "terminated" in state or last for _, state, last in states):
        return all((state.get("waiting") or {}).get("reason", _CREATING[0]) in _CREATING for _, state, _ in states)
    killed = any((state.get("terminated") or last).get("exitCode") in KILLED for _, state, last in states)
    return killed or any(has_served(one, readiness) and not one.get("ready") for one, _, _ in states)
