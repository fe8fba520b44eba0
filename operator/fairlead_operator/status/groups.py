"""A LeaderWorkerSet, as everything that knows Deployments of workers sees it: its bounds and template, and the counts of its leaders. Pure.

LeaderWorkerSet's own status does not say of which spec it speaks, and it knows no deadline. So what is counted is the pods, each of which
says its revision itself; and what does not get on for `spec.rollout.progressDeadlineSeconds` is said to, as a Deployment's controller
would.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes.silence import written
from fairlead_operator.children.groups import KIND, NOT_BELOW, grouped
from fairlead_operator.objects import Body, component_of, ended, instant, ready_at
from fairlead_operator.observed import Observed
from fairlead_operator.rollout.step import SURGE
from fairlead_operator.rollout.strategy import TAKEN_UP, revision_of


def seen(service: InferenceService, observed: Observed, now: datetime) -> Observed:
    """With the service's LeaderWorkerSet where others have the workers' Deployment."""
    live = observed.exposed.get(KIND)
    if not grouped(service) or live is None:
        return observed
    view = as_deployment(live, observed.pods)
    status = view["status"]
    wanted = int(view["spec"].get("replicas") or 0)
    if status["replicas"] == status["updatedReplicas"] == status["readyReplicas"] == wanted or service.spec.rollout.paused:
        return _with(observed, view, None)
    stalls_at = _last_step(live, observed.pods) + service.spec.rollout.progress_deadline_seconds
    if now.timestamp() < stalls_at:
        return _with(observed, view, stalls_at)
    words = f"{KIND} {live['metadata']['name']} has not got on for {service.spec.rollout.progress_deadline_seconds} s"
    stalled = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": words}
    return _with(observed, {**view, "status": {**status, "conditions": [stalled]}}, None)


def standing(observed: Observed) -> Observed:
    """The same whatever the spec says, where it cannot be read: without a deadline."""
    live = observed.exposed.get(KIND)
    if live is None or names.WORKER in observed.deployments:
        return observed
    return _with(observed, as_deployment(live, observed.pods), None)


def as_deployment(live: Body, pods: Iterable[Body]) -> dict[str, Any]:
    """Of kind LeaderWorkerSet still, for the words that people read."""
    spec, metadata = live["spec"], live["metadata"]
    template = (spec.get("leaderWorkerTemplate") or {}).get("leaderTemplate") or {}
    present = [pod for pod in pods if component_of(pod) == names.WORKER and not (ended(pod) or pod["metadata"].get("deletionTimestamp"))]
    ready = sum(ready_at(pod) is not None for pod in present)
    labels = (template.get("metadata") or {}).get("labels") or {}
    selector = {key: value for key, value in labels.items() if key in (names.MANAGED_BY, names.INSTANCE, names.COMPONENT)}
    taken_up = {TAKEN_UP: "1"} if present else {}
    return {
        "apiVersion": live.get("apiVersion"),
        "kind": KIND,
        "metadata": {**metadata, "annotations": {**(metadata.get("annotations") or {}), **taken_up}},
        "spec": {
            "replicas": spec.get("replicas", 1),
            "selector": {"matchLabels": selector},
            "strategy": {"rollingUpdate": _bounds(live)},
            "template": template,
        },
        "status": {
            "observedGeneration": metadata.get("generation"),
            "replicas": len(present),
            "updatedReplicas": sum(revision_of(pod) == revision_of(template) for pod in present),
            "readyReplicas": ready,
            "availableReplicas": ready,
        },
    }


def _bounds(live: Body) -> Body:
    """A rollout that is paused begins anew when it goes on: with a surge."""
    bounds: Body = (live["spec"].get("rolloutStrategy") or {}).get("rollingUpdateConfiguration") or {}
    return SURGE if bounds.get("partition") == NOT_BELOW else bounds


def _last_step(live: Body, pods: Iterable[Body]) -> float:
    """When anything last happened that brings the groups nearer, in seconds since the epoch."""
    times = [written(live["metadata"]) or 0.0]
    for pod in pods:
        if component_of(pod) in names.parts(names.WORKER):
            times += [instant(pod["metadata"].get("creationTimestamp")), ready_at(pod) or 0.0]
    return max(times)


def _with(observed: Observed, view: Body, stalls_at: float | None) -> Observed:
    return replace(observed, deployments={**observed.deployments, names.WORKER: view}, stalls_at=stalls_at)
