"""Chooses the bounds of a rollout's next step. The Deployment controller counts the pods.

Surge is maxSurge 1, maxUnavailable 0; DrainFirst is 0 and 1. Auto starts as Surge. Without capacity for a surge worker, the bounds become
0 and 1: the controller then deletes one old worker, the pending one gets its capacity, and no other is deleted before it is available. The
choice of Auto is read from the Deployment itself: its bounds beside the revision of its template. So the choice survives any restart, and
is made once per revision.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause
from fairlead_operator.objects import Body, component_of, has_ended, is_canary, parse_time
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import belongs_to
from fairlead_operator.rollout import node_capacity
from fairlead_operator.rollout.step import Step

DEPLOYMENT_REVISION = "deployment.kubernetes.io/revision"  # set by the Deployment controller with a Deployment's first ReplicaSet


def next_step(service: InferenceService, observed: Observed, own: str, now: datetime) -> Step:
    """Return the next step. `own`: the revision that the spec itself describes."""
    live = observed.deployments.get(names.WORKER)
    revision, problem = _choose_revision(service, observed, own, live)
    workers = _Workers.of(observed, revision)
    paused = is_pausing(service, live)
    if live is None:
        return Step(revision, service.spec.rollout.strategy != "DrainFirst", problem=problem, in_use=workers.revisions)
    wait = _CapacityWait.of(service, observed, live, workers, now.timestamp())
    surge, activity = _choose_bounds(service, live, revision, workers, wait, paused)
    # The bounds have just become those of draining, so the controller is about to delete a worker.
    about_to_drain = not surge and not paused and wait.open and _available(live) >= _size(live)
    return Step(
        revision,
        surge,
        paused,
        activity,
        problem,
        capacity_expected=(wait.open and not wait.over and wait.helps) or (about_to_drain and bool(workers.old)),
        wake_at=wait.ends if wait.open and not wait.over else None,
        in_use=workers.revisions,
    )


def is_pausing(service: InferenceService, live: Body | None) -> bool:
    """Return whether to pause the Deployment. Only one with a ReplicaSet is paused: another would never create its first pods."""
    return service.spec.rollout.paused and live is not None and DEPLOYMENT_REVISION in (live["metadata"].get("annotations") or {})


def revision_of(body: Body) -> str:
    """Return the revision of a pod or of a pod template."""
    return str(((body.get("metadata") or {}).get("labels") or {}).get(names.REVISION, ""))


def _choose_revision(service: InferenceService, observed: Observed, own: str, live: Body | None) -> tuple[str, Cause | None]:
    """Return the spec's own revision, or the stored one that it names. If that one does not exist, the present one stays."""
    requested = service.spec.rollout.revision
    if requested is None:
        return own, None
    prefix = f"{names.deployment(service, names.WORKER)}-"
    kept = {body["metadata"]["name"].removeprefix(prefix) for body in observed.revisions if belongs_to(body, service, names.WORKER)}
    digest = requested.removeprefix(prefix)
    if digest in kept | {own}:
        return digest, None
    running = revision_of(live["spec"].get("template") or {}) if live is not None else ""
    stays = running if running in kept else own
    known = ", ".join(f"{prefix}{one}" for one in sorted(kept)) or "none"
    message = f"spec.rollout.revision {requested} is not kept; workers stay at {prefix}{stays}. Remove it, or name one of: {known}"
    return stays, Cause("RevisionNotFound", message, fault=True)


@dataclass(frozen=True)
class _Workers:
    """The existing workers by their part in the rollout. A canary pod that stays has no part."""

    new: tuple[Body, ...]  # of the desired revision
    old: tuple[Body, ...]
    placing: tuple[Body, ...]  # all pods of the new workers, including followers: each needs a node
    leaving: tuple[Body, ...]  # terminating, of any revision: a canary pod frees its capacity too
    revisions: frozenset[str]

    @classmethod
    def of(cls, observed: Observed, revision: str) -> "_Workers":
        present = [pod for pod in observed.pods if component_of(pod) in names.pod_components(names.WORKER) and not has_ended(pod)]
        leaving = tuple(pod for pod in present if pod["metadata"].get("deletionTimestamp"))
        every = [pod for pod in present if not (pod["metadata"].get("deletionTimestamp") or is_canary(pod))]
        staying = [pod for pod in every if component_of(pod) == names.WORKER]
        return cls(
            new=tuple(pod for pod in staying if revision_of(pod) == revision),
            old=tuple(pod for pod in staying if revision_of(pod) != revision),
            placing=tuple(pod for pod in every if revision_of(pod) == revision),
            leaving=leaving,
            revisions=frozenset(revision_of(pod) for pod in staying),
        )


@dataclass(frozen=True)
class _CapacityWait:
    """A new worker's wait for capacity."""

    open: bool = False
    helps: bool = False  # draining a worker would free the capacity
    over: bool = False
    ends: float = 0.0  # seconds since the epoch
    words: str = ""

    @classmethod
    def of(cls, service: InferenceService, observed: Observed, live: Body, workers: _Workers, now: float) -> "_CapacityWait":
        """Compute the wait. A leaving worker frees its capacity at `deletionTimestamp` at the latest, and the scheduler needs a moment."""
        found = node_capacity.find_pending(workers.placing, live, _size(live), observed.pod_events)
        if found is None:
            return cls()
        gone = [parse_time(pod["metadata"]["deletionTimestamp"]) for pod in workers.leaving]
        ends = max([found.since, observed.last_departure_at, *gone]) + service.spec.rollout.surge_timeout_seconds
        return cls(True, found.drain_helps, now >= ends, ends, found.words)


def _choose_bounds(
    service: InferenceService, live: Body, revision: str, workers: _Workers, wait: _CapacityWait, paused: bool
) -> tuple[bool, str]:
    """Return whether to surge, and a description."""
    rollout = service.spec.rollout
    draining = _is_draining(live)
    if rollout.strategy == "DrainFirst":
        return False, _waiting_for_workers(live, workers) or "draining one worker first"
    if rollout.strategy == "Surge":
        return True, "surging; no room for a surge worker: set spec.rollout.strategy to Auto, or make room" if wait.over else "surging"
    if paused:
        return not draining, ""
    if draining and _keeps_draining(live, revision, workers):
        return False, _waiting_for_workers(live, workers) or _no_room(rollout.surge_timeout_seconds)
    if not wait.open or not workers.old:
        return True, "surging"
    if not wait.helps:
        return True, f"surging; no node fits, and draining a worker would not help: {wait.words}"
    return (False, _no_room(rollout.surge_timeout_seconds)) if wait.over else (True, "surging; the surge worker waits for room")


def _no_room(timeout: int) -> str:
    return f"no room for a surge worker in {timeout} s: draining one first"


def _size(live: Body) -> int:
    """Return the wanted workers of the Deployment, whether the user or an autoscaler sets them."""
    return int(live["spec"].get("replicas") or 0)


def _available(live: Body) -> int:
    return int((live.get("status") or {}).get("availableReplicas") or 0)


def _is_draining(live: Body) -> bool:
    update: Mapping[str, Any] = (live["spec"].get("strategy") or {}).get("rollingUpdate") or {}
    return update.get("maxSurge") == 0


def _keeps_draining(live: Body, revision: str, workers: _Workers) -> bool:
    """Return whether draining was chosen for this revision, or for an unfinished rollout: then there is still no capacity to surge."""
    running = revision_of(live["spec"].get("template") or {})
    return running == revision or any(revision_of(pod) != running for pod in (*workers.new, *workers.old))


def _waiting_for_workers(live: Body, workers: _Workers) -> str:
    """Return a description while the controller deletes no worker: it does so only with at least one less than wanted available."""
    least, available = _size(live) - 1, _available(live)
    if available >= least or not workers.old:
        return ""
    return f"waiting until {least} workers are available ({available} now) before another is drained"
