"""Services with the defaults of their InferenceProfile: which one a service names, and the merged spec. Pure.

The API server writes the defaults of the CRD into each service, so it does not show which fields a user left out. A field with its default
value therefore counts as left out, and the profile's value applies. `profileRef.excludedFields` is how a service keeps a default.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from fairlead_operator.api import InferenceService, InvalidManifest, ServiceSpec
from fairlead_operator.api.model import is_downloaded, is_in_bucket
from fairlead_operator.api.profile import PROFILE_KIND, find_own_fields, has_field
from fairlead_operator.api.resources import NVIDIA, PRODUCT_LABELS
from fairlead_operator.api.service import describe
from fairlead_operator.kube.merge import merge

ALTERNATIVES = (
    (("model", "cache"), ("persistentVolumeClaim", "hostPath", "emptyDir")),
    (("engine", "kvCache"), ("size", "pages")),
    (("resources",), ("gpuResource", "resourceClaims")),
    (("podDisruptionBudget",), ("minAvailable", "maxUnavailable")),
    (("router", "tls"), ("secretName", "issuerRef")),
)
"""Fields of which one may be set: the service's choice removes the profile's."""


class ProfileNotFound(InvalidManifest):
    """The profile that the service names does not exist."""


def profile_name(body: Mapping[str, Any]) -> str:
    """Return the name of the profile of a service as the API server returned it; empty: it names none."""
    return str(_at(body, ("spec", "profileRef")).get("name") or "")


def parse_service(body: Mapping[str, Any], profile: Mapping[str, Any] | None) -> InferenceService:
    """Parse a service and merge its profile into its spec. Raises InvalidManifest; ProfileNotFound if `profile` is missing."""
    service = InferenceService.parse(body)
    if service.spec.profile_ref is None:
        return service
    name = service.spec.profile_ref.name
    if profile is None:
        raise ProfileNotFound(
            f"spec.profileRef names {PROFILE_KIND} {name}, which does not exist in namespace {service.namespace}: "
            "create it there, correct the name, or remove spec.profileRef"
        )
    defaults = profile.get("spec") or {}
    where = f"{PROFILE_KIND} {name} and this service together"
    if own := next(find_own_fields(defaults), ""):
        raise InvalidManifest(f"{PROFILE_KIND} {name}: spec.{own} belongs to one service: move it from the profile to the services")
    defaults = _exclude(defaults, service.spec.profile_ref.excluded_fields or ())
    try:
        spec = ServiceSpec.model_validate(merge_specs(defaults, given_fields(service.spec)))
    except ValidationError as error:
        raise InvalidManifest(f"{where}: {describe(error)}") from None
    return replace(service, spec=spec)


def _exclude(profile: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the profile without these fields. Raises InvalidManifest for a field that no profile can have."""
    left: dict[str, Any] = deepcopy(dict(profile))
    for path in paths:
        if not has_field(path):
            raise InvalidManifest(
                f"spec.profileRef.excludedFields names {path}, which no {PROFILE_KIND} has: see kubectl explain inferenceprofile.spec"
            )
        *parents, last = path.split(".")
        node = _at(left, parents)
        if last in node:
            del node[last]
    return left


def merge_profile(body: Mapping[str, Any], profile: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the service with its profile's fields in its spec, and as it is where its profile is missing or the two are invalid."""
    if not profile_name(body):
        return dict(body)
    try:
        return {**body, "spec": parse_service(body, profile).spec.model_dump(mode="json", by_alias=True)}
    except InvalidManifest:
        return dict(body)


def given_fields(part: BaseModel) -> dict[str, Any]:
    """Return the fields of a part of the spec that differ from their defaults, under their names in a manifest."""
    return part.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def merge_specs(profile: Mapping[str, Any], service: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the fields of a service over those of its profile: maps by key, lists as in `spec.podTemplate`, the service's value wins."""
    defaults: dict[str, Any] = deepcopy(dict(profile))
    for *path, name in _excluded_fields(defaults, service):
        _at(defaults, path).pop(name, None)
    merged: dict[str, Any] = merge(defaults, service, keep_null=True)
    return merged


def _excluded_fields(profile: Mapping[str, Any], service: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the profile's fields that cannot be combined with what the service sets.

    Conflicts over access, such as `access` with `routing.forwardingMode: Redirect`, are not among them: a service does not lose protection
    without a message.
    """
    for path, names in ALTERNATIVES:
        theirs = _at(service, path)
        if any(name in theirs for name in names):
            yield from ((*path, name) for name in names if name not in theirs)
    if "secretName" in _at(service, ("router", "tls")):
        yield "router", "tls", "dnsNames"
    if _at(service, ("model", "cache")).keys() & {"hostPath", "emptyDir"}:
        yield "model", "cache", "prefetch"
    uri = str(_at(service, ("model",)).get("uri") or "")
    if not is_downloaded(uri):
        yield from (("model", name) for name in ("cache", "secretRef", "endpoint"))
    if not is_in_bucket(uri):
        yield "model", "region"
    resources = _at(service, ("resources",))
    names_gpus = bool(resources.keys() & {"gpuResource", "resourceClaims"})
    if resources.get("gpus") == 0:
        yield from (("resources", name) for name in ("gpuResource", "resourceClaims"))
    elif names_gpus and _at(profile, ("resources",)).get("gpus") == 0:
        yield "resources", "gpus"
    if "gpuType" in resources:
        yield "resources", "resourceClaims"
        if not _has_product_label(_at(profile, ("resources",))):
            yield "resources", "gpuResource"
    elif names_gpus and ("resourceClaims" in resources or not _has_product_label(resources)):
        yield "resources", "gpuType"


def _has_product_label(resources: Mapping[str, Any]) -> bool:
    """Return whether nodes have a label with the product of these GPUs, which `gpuType` selects."""
    return str(resources.get("gpuResource") or NVIDIA).partition("/")[0] in PRODUCT_LABELS


def _at(spec: Mapping[str, Any], path: Sequence[str]) -> Any:
    node: Any = spec
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}
