"""The next step of a rollout. The Deployment controller does the counting; here its bounds are chosen.

Surge is maxSurge 1, maxUnavailable 0; DrainFirst is 0 and 1. Auto begins as Surge. When the surge worker finds no room, the bounds become
0 and 1: the controller then takes one old worker away, the waiting one gets its room, and no further one goes before that one is
available. What Auto has chosen is read from the Deployment itself: its bounds beside the revision of its template. So the choice
survives any restart, and within one revision it is made once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause
from fairlead_operator.objects import Body, component_of, ended, instant, is_canary
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import is_of
from fairlead_operator.rollout import node_room as room
from fairlead_operator.rollout.step import Step

TAKEN_UP = "deployment.kubernetes.io/revision"  # set by the Deployment controller with a Deployment's first ReplicaSet


def next_step(service: InferenceService, observed: Observed, own: str, now: datetime) -> Step:
    """`own`: the revision that the spec itself describes."""
    live = observed.deployments.get(names.WORKER)
    revision, problem = _wanted(service, observed, own, live)
    workers = _Workers.of(observed, revision)
    paused = pausing(service, live)
    if live is None:
        return Step(revision, service.spec.rollout.strategy != "DrainFirst", problem=problem, in_use=workers.revisions)
    wait = _Wait.of(service, observed, live, workers, now.timestamp())
    surge, doing = _choice(service, live, revision, workers, wait, paused)
    # A controller that may still take a worker away will: the bounds have just become those of draining.
    about_to_drain = not surge and not paused and wait.open and _available(live) >= _size(live)
    return Step(
        revision,
        surge,
        paused,
        doing,
        problem,
        room_comes=(wait.open and not wait.over and wait.helps) or (about_to_drain and bool(workers.old)),
        wake_at=wait.ends if wait.open and not wait.over else None,
        in_use=workers.revisions,
    )


def pausing(service: InferenceService, live: Body | None) -> bool:
    """A paused Deployment without a ReplicaSet would never make its first pods: one is paused when it has been taken up."""
    return service.spec.rollout.paused and live is not None and TAKEN_UP in (live["metadata"].get("annotations") or {})


def revision_of(body: Body) -> str:
    """Of a pod, or of a pod template."""
    return str(((body.get("metadata") or {}).get("labels") or {}).get(names.REVISION, ""))


def _wanted(service: InferenceService, observed: Observed, own: str, live: Body | None) -> tuple[str, Cause | None]:
    """The spec's own revision, or the kept one that it names. Of one that is not kept, nothing is known: what runs stays."""
    asked = service.spec.rollout.revision
    if asked is None:
        return own, None
    prefix = f"{names.deployment(service, names.WORKER)}-"
    kept = {body["metadata"]["name"].removeprefix(prefix) for body in observed.revisions if is_of(body, service, names.WORKER)}
    digest = asked.removeprefix(prefix)
    if digest in kept | {own}:
        return digest, None
    running = revision_of(live["spec"].get("template") or {}) if live is not None else ""
    stays = running if running in kept else own
    known = ", ".join(f"{prefix}{one}" for one in sorted(kept)) or "none"
    message = f"spec.rollout.revision {asked} is not kept; workers stay at {prefix}{stays}. Remove it, or name one of: {known}"
    return stays, Cause("RevisionNotFound", message, fault=True)


@dataclass(frozen=True)
class _Workers:
    """The workers that are there, by what they are in the rollout; a canary that stays has no part in it."""

    new: tuple[Body, ...]  # of the wanted revision
    old: tuple[Body, ...]
    placing: tuple[Body, ...]  # all pods of the new ones, those too that only follow: each needs a node
    leaving: tuple[Body, ...]  # terminating, of any revision: a canary, too, gives its room back
    revisions: frozenset[str]

    @classmethod
    def of(cls, observed: Observed, revision: str) -> "_Workers":
        present = [pod for pod in observed.pods if component_of(pod) in names.parts(names.WORKER) and not ended(pod)]
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
class _Wait:
    """A new worker's wait for room."""

    open: bool = False
    helps: bool = False  # draining one would give it room
    over: bool = False
    ends: float = 0.0  # seconds since the epoch
    words: str = ""

    @classmethod
    def of(cls, service: InferenceService, observed: Observed, live: Body, workers: _Workers, now: float) -> "_Wait":
        """A worker that leaves holds its room until it is gone, at `deletionTimestamp` at the latest; then the scheduler needs a moment."""
        found = room.waiting(workers.placing, live, _size(live))
        if found is None:
            return cls()
        gone = [instant(pod["metadata"]["deletionTimestamp"]) for pod in workers.leaving]
        ends = max([found.since, observed.quiet_since, *gone]) + service.spec.rollout.surge_timeout_seconds
        return cls(True, found.drain_helps, now >= ends, ends, found.words)


def _choice(service: InferenceService, live: Body, revision: str, workers: _Workers, wait: _Wait, paused: bool) -> tuple[bool, str]:
    """Whether to surge, and what to say."""
    rollout = service.spec.rollout
    draining = _drains(live)
    if rollout.strategy == "DrainFirst":
        return False, _waiting_for_workers(live, workers) or "draining one worker first"
    if rollout.strategy == "Surge":
        return True, "surging; no room for a surge worker: set spec.rollout.strategy to Auto, or make room" if wait.over else "surging"
    if paused:
        return not draining, ""
    if draining and _still(live, revision, workers):
        return False, _waiting_for_workers(live, workers) or _no_room(rollout.surge_timeout_seconds)
    if not wait.open or not workers.old:
        return True, "surging"
    if not wait.helps:
        return True, f"surging; no node fits, and draining a worker would not help: {wait.words}"
    return (False, _no_room(rollout.surge_timeout_seconds)) if wait.over else (True, "surging; the surge worker waits for room")


def _no_room(timeout: int) -> str:
    return f"no room for a surge worker in {timeout} s: draining one first"


def _size(live: Body) -> int:
    """Workers that the Deployment is to have, whoever decides it."""
    return int(live["spec"].get("replicas") or 0)


def _available(live: Body) -> int:
    return int((live.get("status") or {}).get("availableReplicas") or 0)


def _drains(live: Body) -> bool:
    update: Mapping[str, Any] = (live["spec"].get("strategy") or {}).get("rollingUpdate") or {}
    return update.get("maxSurge") == 0


def _still(live: Body, revision: str, workers: _Workers) -> bool:
    """Draining was chosen for this revision, or for a rollout that is not finished: where there was no room for it, there is none now."""
    running = revision_of(live["spec"].get("template") or {})
    return running == revision or any(revision_of(pod) != running for pod in (*workers.new, *workers.old))


def _waiting_for_workers(live: Body, workers: _Workers) -> str:
    """The controller takes no worker away while fewer serve than one less than wanted."""
    least, available = _size(live) - 1, _available(live)
    if available >= least or not workers.old:
        return ""
    return f"waiting until {least} workers are available ({available} now) before another is drained"
