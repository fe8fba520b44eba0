"""`status.revisions`, `status.modelCommit` and condition UpToDate. Pure."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.status import Condition, ImageUpdateStatus, ModelCommitStatus, RevisionStatus
from fairlead_operator.objects import Body, component_of, has_ended, ready_at
from fairlead_operator.observed import FleetView, ModelCommit, Observed
from fairlead_operator.revisions import find_revision
from fairlead_operator.rollout.images import image_of, model_of
from fairlead_operator.rollout.strategy import revision_of
from fairlead_operator.status.conditions import Conditions, find

MAX_LISTED = 16  # revisions of one component
_COMMIT = re.compile(r"^hf://[^@]+@([0-9a-f]{40})$")
_OF_WAVES = ("WaitingForWave", "RolloutStopped")
_TRUE = ("Current", "Observing")


def build_revisions(service: InferenceService, observed: Observed, wanted: Mapping[str, str]) -> list[RevisionStatus]:
    """Return the revisions that pods run, and the wanted ones (component → digest), of workers and routers."""
    made = []
    for component in (names.WORKER, names.ROUTER):
        pods = [pod for pod in observed.pods if component_of(pod) == component and not _is_leaving(pod)]
        digests = {wanted[component]} | {revision_of(pod) for pod in pods} - {""}
        listed = sorted(digests, key=lambda digest: (digest != wanted[component], digest))[:MAX_LISTED]
        for digest in listed:
            of = [pod for pod in pods if revision_of(pod) == digest]
            made.append(
                RevisionStatus.model_validate(
                    {
                        "name": f"{names.deployment(service, component)}-{digest}",
                        "component": component,
                        "image": image_of(_template(service, observed, component, digest), component)[:512],
                        "desired": digest == wanted[component],
                        "replicas": len(of),
                        "ready_replicas": sum(ready_at(pod) is not None for pod in of),
                    }
                )
            )
    return made


def build_model_commit(
    service: InferenceService, observed: Observed, wanted: str, before: ModelCommitStatus | None
) -> ModelCommitStatus | None:
    """Return the commit in the template of the wanted workers; None for other models than hf://. A problem stays until there is one."""
    if not service.spec.model.uri.startswith("hf://"):
        return None
    given = model_of(_template(service, observed, names.WORKER, wanted))
    found = _COMMIT.match(given)
    if found is not None:
        return ModelCommitStatus(commit=found.group(1))
    seen: ModelCommit | None = observed.model_commit
    if seen is not None and seen.problem:
        return ModelCommitStatus(message=seen.problem[:512])
    return before if before is not None and not before.commit else None


def build_condition(service: InferenceService, update: ImageUpdateStatus, fleet: FleetView, now: datetime) -> Condition:
    """Return condition UpToDate: whether the pods run the operator's newest images, and if not, why."""
    reason: str = update.phase
    message = update.message
    before = find(service.status.conditions, "UpToDate")
    if update.phase == "Waiting" and not message and fleet.stopped is None and before is not None and before.reason in _OF_WAVES:
        reason, message = before.reason, before.message
    elif update.phase == "Waiting" and not message:
        reason = "RolloutStopped" if fleet.stopped else "WaitingForWave"
        message = fleet.stopped or "the service waits for its wave"
    elif update.phase == "Current":
        message = "All pods get the newest images"
    conditions = Conditions(service.status.conditions, service.generation, now)
    conditions.set("UpToDate", update.phase in _TRUE, "UpdateFailed" if update.phase in ("RollingBack", "Failed") else reason, message)
    return conditions.items[0]


def update_events(before: ImageUpdateStatus | None, after: ImageUpdateStatus | None) -> list[tuple[str, str, str]]:
    """Return the Events (type, reason, message) of an update that began, succeeded or failed."""
    if before is None or after is None or before.phase == after.phase:
        return []
    images = f"{after.worker_image} and {after.router_image}"
    if after.phase == "RollingOut":
        return [("Normal", "UpdatingImages", f"The update to {images} begins")]
    if after.phase == "RollingBack":
        return [("Warning", "UpdateFailed", f"{images}: {after.message}")]
    return [("Normal", "ImagesUpdated", f"The service serves with {images}")] if before.phase == "Observing" else []


def _template(service: InferenceService, observed: Observed, component: str, digest: str) -> Mapping[str, Any]:
    live = ((observed.deployments.get(component) or {}).get("spec") or {}).get("template") or {}
    if revision_of(live) == digest:
        return live
    held = find_revision(service, component, digest, observed.revisions)
    return ((held or {}).get("data") or {}).get("template") or {}


def _is_leaving(pod: Body) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp")) or has_ended(pod)
