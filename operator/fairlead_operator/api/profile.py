"""InferenceProfile: fields that several services share. A service names one in `spec.profileRef`.

The comparison is `baseRefs` of KServe's LLMInferenceService. A profile has the fields of a service that describe a kind of deployment, and
not those of one model or one rollout.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from fairlead_operator.api.schema import Schema, structural_schema
from fairlead_operator.api.spec import ServiceSpec

PROFILE_KIND, PROFILE_PLURAL = "InferenceProfile", "inferenceprofiles"
OWN_FIELDS = (
    "profileRef",
    "replicas",
    "batch",
    "model.uri",
    "model.name",
    "model.revision",
    "model.adapters",
    "engine.nodes",
    "engine.speculativeDecoding",
    "exposure.gateway",
    "rollout.revision",
    "rollout.canary.promotedRevision",
    "rollout.canary.retryToken",
)
"""Fields that only a service has: they belong to one model or one rollout, or decide which kinds of objects exist."""


def find_own_fields(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of a profile's spec that only a service may have."""
    for path in OWN_FIELDS:
        node: Any = spec
        for name in path.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        if node is not None:
            yield path


def has_field(path: str) -> bool:
    """Return whether a profile may have the field, such as `routing.replicas`."""
    node = profile_schema()
    for name in path.split("."):
        if node.get("x-kubernetes-preserve-unknown-fields"):
            return True
        node = node.get("properties", {}).get(name)
        if node is None:
            return False
    return True


@cache
def profile_schema() -> Schema:
    """Return the schema of a profile's spec: that of a service without defaults, and nothing is required.

    Rules over several fields are left out, because the other field may be the service's. The operator checks the merged spec.
    """
    schema = _relax(structural_schema(ServiceSpec, defaults=False))
    for path in OWN_FIELDS:
        *parents, last = path.split(".")
        node = schema
        for name in parents:
            node = node["properties"][name]
        del node["properties"][last]
    schema["description"] = "Fields of InferenceService.spec. Each applies to services that name this profile and do not set it themselves."
    return schema


def _relax(node: Schema) -> Schema:
    """Remove `required` and the rules of objects; items of lists are whole objects and keep both."""
    if node.get("type") != "object":
        return node
    node = {key: value for key, value in node.items() if key not in ("required", "x-kubernetes-validations")}
    if "properties" in node:
        node["properties"] = {name: _relax(child) for name, child in node["properties"].items()}
    return deepcopy(node)
