"""Pins pod templates by revision, so that only the user's spec restarts pods.

A template is rendered when a spec is first seen, and stored in a ControllerRevision (whose data is immutable). While the spec stays the
same, the stored template is used, even if an operator of another version or configuration would render another one. A spec that is
reverted gets its old template back. Pure.
"""

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.kube.kinds import REVISIONS, make_child
from fairlead_operator.objects import Object

MAX_REVISIONS = 5  # revisions of one component, including the wanted one


def non_default_fields(part: BaseModel, *only: str) -> dict[str, Any]:
    """Return the fields of a part of the spec that differ from their defaults.

    A field with a default that a later version adds changes no digest. The API server writes defaults into the spec, so the spec does not
    show what the user left out. This relies on Kubernetes' rule that no default changes within one API version
    (tests/operator/rollout/test_revisions.py checks it).
    """
    made: dict[str, Any] = {}
    dumped = part.model_dump(mode="json", by_alias=True)
    for name, field in type(part).model_fields.items():
        key, value = field.alias or name, getattr(part, name)
        if (only and name not in only) or value is None:
            continue
        if isinstance(value, BaseModel):
            inner = non_default_fields(value)
            if inner:
                made[key] = inner
        elif field.is_required() or value != _defaults(type(part))[name]:
            made[key] = dumped[key]
    return made


def _fields_except(part: BaseModel, *left_out: str) -> dict[str, Any]:
    """Return the fields that differ from their defaults and shape pods: all that are not listed, so a new one restarts them."""
    return non_default_fields(part, *(name for name in type(part).model_fields if name not in left_out))


@cache
def _defaults(part: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults, cached per model: pydantic inspects every factory's signature again, which took half the time of `desired`."""
    fields = part.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}


def worker_revision(service: InferenceService) -> str:
    """Return a digest of what the spec says about worker pods. It does not depend on the operator's version or configuration."""
    shaping = non_default_fields(service.spec, "model", "engine", "resources", "pod_template", "image_pull_secrets")
    shaping["model"].get("cache", {}).pop("prefetch", None)  # a Job's, not the workers'
    rollout = non_default_fields(service.spec.rollout, "drain_timeout_seconds", "restarted_at")
    return names.digest([shaping, rollout, service.served_model_name])


def router_revision(service: InferenceService) -> str:
    """Return a digest of what the spec says about router pods."""
    routing = _fields_except(service.spec.routing, "replicas")
    parts: list[Any] = [routing, non_default_fields(service.spec.rollout, "drain_timeout_seconds"), service.served_model_name]
    if service.spec.slo is not None:
        parts.append(non_default_fields(service.spec, "slo"))
    if service.spec.access is not None:
        parts.append(non_default_fields(service.spec.access))
    if service.spec.exposure.picks_endpoints:
        parts.append("picker")
    if service.spec.rollout.canary is not None:
        parts.append("split")  # whether there may be canaries; their weight does not change the router's pods
    if service.spec.batch is not None:
        parts.append("batch")
    if service.spec.router.tls is not None:
        parts.append({"tls": names.router_tls_secret(service)})
    if service.spec.exposure.other_services:
        parts.append("model routes")  # their names do not change the router's pods
    if router := _fields_except(service.spec.router, "autoscaling", "tls"):
        parts.append(router)
    if service.spec.image_pull_secrets:
        parts.append(non_default_fields(service.spec, "image_pull_secrets"))
    if scales_to_zero(service):
        parts.append("ready without workers")
    return names.digest(parts)


def batch_revision(service: InferenceService) -> str:
    """Return a digest of what the spec says about the pod of the batch server."""
    parts = non_default_fields(service.spec, "batch", "image_pull_secrets") | non_default_fields(service.spec.routing, "image")
    if service.spec.router.tls is not None:
        parts |= {"tls": names.router_tls_secret(service)}
    return names.digest([parts, non_default_fields(service.spec.rollout, "drain_timeout_seconds")])


def scales_to_zero(service: InferenceService) -> bool:
    """Return whether routers must accept requests while no worker exists: otherwise nothing would notice a request."""
    return service.spec.scaling is not None and service.spec.scaling.idle_seconds is not None


@dataclass(frozen=True)
class CanaryFailure:
    """Why a revision was rolled back as a canary, and `spec.rollout.canary.retryToken` at that time. False where `reason` is empty."""

    reason: str = ""
    retry: str = ""

    def __bool__(self) -> bool:
        return bool(self.reason)


NO_FAILURE = CanaryFailure()


@dataclass(frozen=True)
class PinnedTemplate:
    """The template to use now, and the revisions of its component to keep, the wanted one first."""

    template: Object
    revisions: list[Object]


def pin(
    service: InferenceService,
    component: str,
    digest: str,
    rendered: Object,
    seen: Iterable[Mapping[str, Any]],
    in_use: Collection[str] = (),
    failed: CanaryFailure = NO_FAILURE,
) -> PinnedTemplate:
    """Return the template of revision `digest`; `rendered` where none is stored yet.

    Revisions beyond MAX_REVISIONS are left out, and so deleted, unless pods still run them (`in_use`): an edit that is reverted must find
    their template unchanged, after any number of edits. `failed`: how `digest` failed as a canary, which is stored with it.
    """
    others = {body["metadata"]["name"]: body for body in seen if belongs_to(body, service, component)}
    wanted = f"{names.deployment(service, component)}-{digest}"
    held = others.pop(wanted, None)
    newest = max(map(_number, others.values()), default=0)
    data = {"template": deepcopy(rendered)} if held is None else held["data"]
    number = newest + 1 if held is None else max(_number(held), newest + 1)
    last_used = sorted(others.values(), key=lambda body: (_number(body), body["metadata"]["name"]), reverse=True)
    running = [body for body in last_used[MAX_REVISIONS - 1 :] if body["metadata"]["name"].rpartition("-")[2] in in_use]
    kept = [
        _revision(service, component, body["metadata"]["name"], _number(body), body["data"], failure_of(body))
        for body in [*last_used[: MAX_REVISIONS - 1], *running]
    ]
    return PinnedTemplate(deepcopy(data["template"]), [_revision(service, component, wanted, number, data, failed), *kept])


def find_revision(service: InferenceService, component: str, digest: str, seen: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the ControllerRevision of `digest`; None: there is none."""
    wanted = f"{names.deployment(service, component)}-{digest}"
    return next((body for body in seen if body["metadata"]["name"] == wanted and belongs_to(body, service, component)), None)


def failure_of(revision: Mapping[str, Any] | None) -> CanaryFailure:
    """Return how the revision failed as a canary."""
    annotations = ((revision or {}).get("metadata") or {}).get("annotations") or {}
    return CanaryFailure(str(annotations.get(names.CANARY_FAILED, "")), str(annotations.get(names.CANARY_RETRY, "")))


def _number(body: Mapping[str, Any]) -> int:
    return int(body.get("revision") or 0)


def belongs_to(body: Mapping[str, Any], service: InferenceService, component: str) -> bool:
    """Return whether a revision is of this uid: a service that was deleted and created again starts without revisions."""
    metadata = body["metadata"]
    owned = any(reference.get("uid") == service.uid for reference in metadata.get("ownerReferences") or [])
    return owned and (metadata.get("labels") or {}).get(names.COMPONENT) == component


def _revision(service: InferenceService, component: str, name: str, number: int, data: Mapping[str, Any], failed: CanaryFailure) -> Object:
    """Build a ControllerRevision. `number` grows with use: the revision used last has the highest."""
    made = make_child(service, REVISIONS, name, component, revision=number, data=data)
    if failed:
        made["metadata"]["annotations"] = {names.CANARY_FAILED: failed.reason} | (
            {names.CANARY_RETRY: failed.retry} if failed.retry else {}
        )
    return made
