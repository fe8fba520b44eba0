"""Pod templates pinned by revision, so that only the user's spec restarts pods.

A template is rendered once, when a spec is first seen, and kept in a ControllerRevision (whose data the API server lets nobody change).
As long as the spec says the same, the kept template is used, whatever an operator of another version or configuration would render.
A spec that is edited back gets its old template back. Pure.
"""

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.objects import Object

KIND = "ControllerRevision"
KEPT = 5  # revisions of one component, the wanted one included


def said(part: BaseModel, *only: str) -> dict[str, Any]:
    """What a part of the spec says beyond its defaults: a field that a later version adds, with a default, changes no digest.

    The API server writes defaults into the spec, so what the user left out cannot be told from the spec itself. This relies on
    Kubernetes' own rule that within one API version no default changes (tests/operator/rollout/test_revisions.py holds them).
    """
    made: dict[str, Any] = {}
    dumped = part.model_dump(mode="json", by_alias=True)
    for name, field in type(part).model_fields.items():
        key, value = field.alias or name, getattr(part, name)
        if (only and name not in only) or value is None:
            continue
        if isinstance(value, BaseModel):
            inner = said(value)
            if inner:
                made[key] = inner
        elif field.is_required() or value != _defaults(type(part))[name]:
            made[key] = dumped[key]
    return made


@cache
def _defaults(part: type[BaseModel]) -> dict[str, Any]:
    """Asked of pydantic once for each model: it inspects every factory's signature anew, which was half of the time of `desired`."""
    fields = part.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}


def worker_revision(service: InferenceService) -> str:
    """A digest of what the user's spec says about worker pods: an operator of another version or configuration has the same."""
    shaping = said(service.spec, "model", "engine", "resources", "pod_template", "image_pull_secrets") | _of_index(service)
    return names.digest([shaping, said(service.spec.rollout, "drain_timeout_seconds"), service.served_model_name])


def router_revision(service: InferenceService) -> str:
    """Return a digest of what the spec says about router pods."""
    choices = (
        "policy",
        "index_mode",
        "index_groups",
        "forwarding_mode",
        "metrics_names",
        "hold_timeout_seconds",
        "max_expected_ttft_milliseconds",
        "args",
    )
    routing = said(service.spec.routing, *choices)
    parts: list[Any] = [routing, said(service.spec.rollout, "drain_timeout_seconds"), service.served_model_name]
    if service.spec.access is not None:
        parts.append(said(service.spec.access))
    if service.spec.exposure.picks_endpoints:
        parts.append("picker")
    if service.spec.rollout.canary is not None:
        parts.append("split")  # that there may be canaries; their weight is no part of a router
    if service.spec.image_pull_secrets:
        parts.append(said(service.spec, "image_pull_secrets"))
    if scales_to_zero(service):
        parts.append("ready without workers")
    return names.digest(parts)


def scales_to_zero(service: InferenceService) -> bool:
    """Whether routers must be there for requests while no worker is, or nobody would learn of them."""
    return service.spec.scaling is not None and service.spec.scaling.idle_seconds is not None


def _of_index(service: InferenceService) -> dict[str, object]:
    """What the spec says about the index. Workers and routers must agree on it, so both are rolled when it changes."""
    return said(service.spec.routing, "index_groups")


@dataclass(frozen=True)
class Failure:
    """Why a revision was rolled back as a canary, and `spec.rollout.canary.retryToken` of that trial. False where `why` is empty."""

    why: str = ""
    retry: str = ""

    def __bool__(self) -> bool:
        return bool(self.why)


NO_FAILURE = Failure()


@dataclass(frozen=True)
class Pinned:
    """The template to use now, and the revisions of its component to be kept, the wanted one first."""

    template: Object
    revisions: list[Object]


def pinned(
    service: InferenceService,
    component: str,
    digest: str,
    rendered: Object,
    seen: Iterable[Mapping[str, Any]],
    in_use: Collection[str] = (),
    failed: Failure = NO_FAILURE,
) -> Pinned:
    """`rendered` is used where no revision `digest` is seen yet. Older revisions beyond KEPT are left out, to be deleted; not those that
    pods still run (`in_use`): an edit that is taken back must find their template as it was, however many edits came between.
    `failed`: how `digest` failed as a canary, to be remembered."""
    others = {body["metadata"]["name"]: body for body in seen if is_of(body, service, component)}
    wanted = f"{names.deployment(service, component)}-{digest}"
    held = others.pop(wanted, None)
    newest = max(map(_number, others.values()), default=0)
    data = {"template": deepcopy(rendered)} if held is None else held["data"]
    number = newest + 1 if held is None else max(_number(held), newest + 1)
    last_used = sorted(others.values(), key=lambda body: (_number(body), body["metadata"]["name"]), reverse=True)
    running = [body for body in last_used[KEPT - 1 :] if body["metadata"]["name"].rpartition("-")[2] in in_use]
    kept = [
        _revision(service, component, body["metadata"]["name"], _number(body), body["data"], failure_of(body))
        for body in [*last_used[: KEPT - 1], *running]
    ]
    return Pinned(deepcopy(data["template"]), [_revision(service, component, wanted, number, data, failed), *kept])


def find(service: InferenceService, component: str, digest: str, seen: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The ControllerRevision of `digest`, if it is there."""
    wanted = f"{names.deployment(service, component)}-{digest}"
    return next((body for body in seen if body["metadata"]["name"] == wanted and is_of(body, service, component)), None)


def failure_of(revision: Mapping[str, Any] | None) -> Failure:
    """Return how it failed as a canary."""
    annotations = ((revision or {}).get("metadata") or {}).get("annotations") or {}
    return Failure(str(annotations.get(names.CANARY_FAILED, "")), str(annotations.get(names.CANARY_RETRY, "")))


def _number(body: Mapping[str, Any]) -> int:
    return int(body.get("revision") or 0)


def is_of(body: Mapping[str, Any], service: InferenceService, component: str) -> bool:
    """Of this very service: one that was deleted and made again begins anew."""
    metadata = body["metadata"]
    owned = any(reference.get("uid") == service.uid for reference in metadata.get("ownerReferences") or [])
    return owned and (metadata.get("labels") or {}).get(names.COMPONENT) == component


def _revision(service: InferenceService, component: str, name: str, number: int, data: Mapping[str, Any], failed: Failure) -> Object:
    """`number` grows with use: the one used last has the highest."""
    metadata = names.metadata(service, name, component)
    if failed:
        metadata["annotations"] = {names.CANARY_FAILED: failed.why} | ({names.CANARY_RETRY: failed.retry} if failed.retry else {})
    return {
        "apiVersion": "apps/v1",
        "kind": KIND,
        "metadata": metadata,
        "revision": number,
        "data": data,
    }
