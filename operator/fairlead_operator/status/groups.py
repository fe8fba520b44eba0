"""Presents a LeaderWorkerSet as a Deployment of workers: its bounds and template, and the counts of its leaders. Pure.

LeaderWorkerSet's status does not say which spec it describes, and has no deadline. So the pods are counted by their
revision. A group without progress for `spec.rollout.progressDeadlineSeconds` is reported as stalled, as a Deployment's controller would do.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.causes.unresponsive import last_written_at
from fairlead_operator.children.groups import PAUSED_PARTITION, is_grouped
from fairlead_operator.kube.kinds import WORKER_SETS
from fairlead_operator.objects import Body, component_of, has_ended, parse_time, ready_at
from fairlead_operator.observed import Observed
from fairlead_operator.rollout.step import SURGE
from fairlead_operator.rollout.strategy import DEPLOYMENT_REVISION, revision_of


def with_group_as_deployment(service: InferenceService, observed: Observed, now: datetime) -> Observed:
    """Return `observed` with the service's LeaderWorkerSet in place of the workers' Deployment."""
    live = observed.optional_objects.get(WORKER_SETS.kind)
    if not is_grouped(service) or live is None:
        return observed
    view = as_deployment(live, observed.pods)
    status = view["status"]
    wanted = int(view["spec"].get("replicas") or 0)
    if status["replicas"] == status["updatedReplicas"] == status["readyReplicas"] == wanted or service.spec.rollout.paused:
        return _with_worker_deployment(observed, view, None)
    progress_deadline_at = _last_step(live, observed.pods) + service.spec.rollout.progress_deadline_seconds
    if now.timestamp() < progress_deadline_at:
        return _with_worker_deployment(observed, view, progress_deadline_at)
    words = f"{WORKER_SETS.kind} {live['metadata']['name']} has made no progress for {service.spec.rollout.progress_deadline_seconds} s"
    stalled = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": words}
    return _with_worker_deployment(observed, {**view, "status": {**status, "conditions": [stalled]}}, None)


def with_live_group_as_deployment(observed: Observed) -> Observed:
    """Return the same without a deadline, for a spec that cannot be read."""
    live = observed.optional_objects.get(WORKER_SETS.kind)
    if live is None or names.WORKER in observed.deployments:
        return observed
    return _with_worker_deployment(observed, as_deployment(live, observed.pods), None)


def as_deployment(live: Body, pods: Iterable[Body]) -> dict[str, Any]:
    """Return a Deployment's fields. The kind stays LeaderWorkerSet, because messages contain it."""
    spec, metadata = live["spec"], live["metadata"]
    template = (spec.get("leaderWorkerTemplate") or {}).get("leaderTemplate") or {}
    present = [
        pod for pod in pods if component_of(pod) == names.WORKER and not (has_ended(pod) or pod["metadata"].get("deletionTimestamp"))
    ]
    ready = sum(ready_at(pod) is not None for pod in present)
    labels = (template.get("metadata") or {}).get("labels") or {}
    selector = {key: value for key, value in labels.items() if key in (names.MANAGED_BY, names.INSTANCE, names.COMPONENT)}
    taken_up = {DEPLOYMENT_REVISION: "1"} if present else {}
    return {
        "apiVersion": live.get("apiVersion"),
        "kind": WORKER_SETS.kind,
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
    """Return the rollout's bounds. A paused rollout starts again with a surge when it resumes."""
    bounds: Body = (live["spec"].get("rolloutStrategy") or {}).get("rollingUpdateConfiguration") or {}
    return SURGE if bounds.get("partition") == PAUSED_PARTITION else bounds


def _last_step(live: Body, pods: Iterable[Body]) -> float:
    """Return the time of the groups' last progress, in seconds since the epoch."""
    times = [last_written_at(live["metadata"]) or 0.0]
    for pod in pods:
        if component_of(pod) in names.pod_components(names.WORKER):
            times += [parse_time(pod["metadata"].get("creationTimestamp")), ready_at(pod) or 0.0]
    return max(times)


def _with_worker_deployment(observed: Observed, view: Body, progress_deadline_at: float | None) -> Observed:
    return replace(observed, deployments={**observed.deployments, names.WORKER: view}, progress_deadline_at=progress_deadline_at)
