"""Each field of the manifest changes an object that the operator makes, and a pod template that changes has another revision."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.support.manifests import SETTINGS, service

from fairlead_operator.api import InvalidManifest
from fairlead_operator.api.crd import custom_resource_definition
from fairlead_operator.desired import desired
from fairlead_operator.kube.kinds import OPTIONAL, REVISIONS
from fairlead_operator.names import REVISION
from fairlead_operator.observed import Observed

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OBSERVED = Observed(served=frozenset(kind.kind for kind in OPTIONAL))
SPEC = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
BASES: list[dict[str, Any]] = [
    {},
    {
        "model": {
            "secretRef": {"name": "a"},
            "cache": {"persistentVolumeClaim": {"claimName": "a"}},
            "adapters": [{"name": "a", "uri": "hf://a/a"}],
        },
        "engine": {"speculativeDecoding": {"method": "Draft", "draftModelURI": "file:///a"}, "env": [{"name": "A", "value": "1"}]},
        "resources": {"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "a"}]},
        "router": {"tls": {"issuerRef": {"name": "a"}}, "autoscaling": {"maxReplicas": 4}},
        "slo": {"classes": [{"name": "a", "ttftMilliseconds": 1000}, {"name": "b"}, {"name": "other"}]},
        "access": {"keysSecretRef": {"name": "a"}},
        "batch": {"storageURI": "s3://aaa"},
        "exposure": {"gateway": {"parentRef": {"name": "a"}}},
        "imagePullSecrets": [{"name": "a"}],
    },
    {
        "model": {"uri": "s3://aaa"},
        "engine": {"tensorParallel": 2, "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "a"}}}]},
        "exposure": {"gateway": {"parentRef": {"name": "a"}, "backend": "EndpointPicker"}, "fromNamespaces": ["a"]},
    },
]
"""Specs that have the optional parts, of which one field is changed."""
STRINGS = (
    *("b", "other", "bb.example", "2", "2Gi", "7%", "--flag=value", "ClusterIssuer"),
    *("amd.com/gpu", "nvidia.com/other", "/b", "/c", "https://b", "hf://b/b", "s3://bbb", "pvc://b"),
)
"""Values of strings. A field skips those that it refuses."""
UNRENDERED = {
    "profileRef": "its fields are merged into the spec before (profiles/test_merge.py)",
    "scaling": "it bounds replicas by load and time (scaling/)",
    "rollout.canary": "routers read it from the operator, without a restart (rollout/test_canary.py)",
    "engine.speculativeDecoding.method": "each needs other fields beside it (test_desired.py)",
    "rollout.restartedAt": "it changes the revision alone (rollout/test_images.py)",
    "rollout.surgeTimeoutSeconds": "it decides when a rollout waits no longer (rollout/test_rollout.py)",
    "rollout.paused": "it stops a rollout that has begun (rollout/test_rollout.py)",
    "rollout.revision": "it names one that is stored (rollout/test_rollout.py)",
    "rollout.engineVersion": "it compares images with those that run (rollout/test_images.py)",
}
"""Fields without an effect on the objects of a new service, and why."""


def values(schema: dict[str, Any]) -> list[Any]:
    """Return values to try, the default among them."""
    match schema.get("type"):
        case _ if "enum" in schema:
            return list(schema["enum"])
        case "boolean":
            return [True, False]
        case "integer":
            least = schema["minimum"]
            return [schema.get("default", least) + 1, least, 2 * schema.get("default", 1), 4096, 8192]
        case "array":
            return [[value] for value in values(schema["items"])]
        case "object":
            return [{"priorityClassName": "b"}, {"b": "b"}, {"b": "c"}, *({"secretKeyRef": {"name": name, "key": "a"}} for name in "bc")]
    return [*STRINGS, 2]


def fields(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield each field that has no fields of its own. Those of a list's items have the path of the list."""
    for name, part in schema["properties"].items():
        inner = part.get("items", part)
        if "properties" in inner:
            yield from fields(inner, (*path, name))
        else:
            yield (*path, name), part


def with_value(base: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the spec with another value of one field, in a list that of its first item."""
    spec = part = deepcopy(base)
    for name in path[:-1]:
        part = part.setdefault(name, {})
        part = part[0] if isinstance(part, list) else part
    part[path[-1]] = value
    return spec


def has_part(base: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Return whether the spec has the parts around a field, by itself or by default."""
    part: Any = service(**base).spec.model_dump(by_alias=True)
    for name in path[:-1]:
        part = part[name]
        if not part:
            return False
        part = part[0] if isinstance(part, list) else part
    return True


def render(spec: dict[str, Any]) -> tuple[str, dict[tuple[str, str], str]]:
    """Return the objects as text without revisions, and the pod templates by (name, revision).

    Raises InvalidManifest for a value that `spec` cannot have.
    """
    made = [one for one in desired(service(**spec), OBSERVED, SETTINGS, NOW).objects if one["kind"] != REVISIONS.kind]
    text, templates = json.dumps(made), {}
    for revision in set(re.findall(rf'"{REVISION}": "(\w+)"', text)):
        text = text.replace(revision, "")
    for one in made:
        pods = one.get("spec", {}).get("template", {})
        if revision := pods.get("metadata", {}).get("labels", {}).get(REVISION):
            templates[one["metadata"]["name"], revision] = json.dumps(pods)
    return text, templates


FIELDS = [field for field in fields(SPEC) if not any(f"{'.'.join(field[0])}.".startswith(f"{one}.") for one in UNRENDERED)]


@pytest.mark.parametrize(("path", "schema"), [pytest.param(*field, id=".".join(field[0])) for field in FIELDS])
def test_a_field_takes_effect_and_a_changed_pod_template_has_another_revision(path: tuple[str, ...], schema: dict[str, Any]) -> None:
    has_effect = False
    for base in BASES:
        text, templates = render(base)
        seen = {text} if has_part(base, path) else set()
        for value in values(schema):
            try:
                text, made = render(with_value(base, path, value))
            except InvalidManifest:
                continue
            seen.add(text)
            for key, template in made.items():
                assert templates.setdefault(key, template) == template, f"{value!r} changes the pods of {key[0]}: add it to revisions.py"
        has_effect |= len(seen) > 1
    assert has_effect, "two values give the same objects: use the field in operator/fairlead_operator/children"
