"""The generated CRD: fresh, small, structural, bounded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairlead_operator.api.crd import custom_resource_definition
from fairlead_operator.crd import render_files

ROOT = Path(__file__).parents[3]


def test_the_committed_crds_match_the_models() -> None:
    for path, text in render_files().items():
        assert (ROOT / path).read_text() == text, f"{path} is stale: run `make crds`"


def test_it_is_small_enough_for_a_plain_kubectl_apply() -> None:
    """`kubectl apply` stores the object in an annotation, and all annotations together may have 262,144 bytes."""
    for path, text in render_files().items():
        assert len(text.encode()) <= 80 * 1024, f"{path} has {len(text.encode())} bytes: shorten descriptions"


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from nodes(schema[name], f"{path}[]")


def test_everything_is_bounded_and_described() -> None:
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path, node in nodes(schema["properties"]["spec"], "spec"):
        assert not {"$ref", "anyOf", "title"} & node.keys(), path
        assert node.get("type") != "number", f"{path} is a float, whose text differs between clients: use an integer with a unit"
        if node.get("type") == "string" or "x-kubernetes-int-or-string" in node:
            assert "maxLength" in node or "enum" in node, f"{path} has no bound"
        if node.get("type") == "array":
            assert "maxItems" in node, f"{path} has no bound"
        if node.get("type") == "integer":
            assert "minimum" in node and "maximum" in node, f"{path} has no bound"
        if node.get("type") == "object" and "properties" not in node:
            assert "maxProperties" in node, f"{path} has no bound"
        assert path.endswith("[]") or node.get("description"), f"{path} has no description"
