"""Conversion of pydantic's JSON schema to a Kubernetes structural schema: inline, without `$ref` or `anyOf`, with all defaults."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]
_DROPPED = {"title", "examples", "$defs", "properties", "items", "additionalProperties"}


_BOUNDS = {"minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems"}


def structural_schema(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """Return the structural schema of one model for `openAPIV3Schema`."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    schema = _walk(raw, raw.get("$defs", {}), defaults)
    schema.pop("default", None)  # the root of the spec is required
    return schema


def status_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of what only the operator writes, and its models check: without defaults and bounds."""
    return _without_bounds(structural_schema(model, defaults=False))


def _without_bounds(schema: Schema) -> Schema:
    kept = {key: value for key, value in schema.items() if key not in _BOUNDS and value != "int64"}
    if "properties" in kept:
        kept["properties"] = {name: _without_bounds(child) for name, child in kept["properties"].items()}
    return kept | ({"items": _without_bounds(kept["items"])} if "items" in kept else {})


def _walk(node: Mapping[str, Any], definitions: Mapping[str, Schema], defaults: bool) -> Schema:
    node, optional = _flatten(node, definitions)
    schema: Schema = {key: value for key, value in node.items() if key not in _DROPPED}
    if "description" in schema:
        schema["description"] = re.sub(r"\s+", " ", schema["description"]).strip()
    if "properties" in node:
        schema["properties"] = {name: _walk(child, definitions, defaults) for name, child in node["properties"].items()}
        if not optional and not schema.get("required"):
            # A part that is absent still gets its defaults. They are written out in full, because the API server validates the default
            # of a part before it applies the defaults inside.
            schema["default"] = {name: child["default"] for name, child in schema["properties"].items() if "default" in child}
    if "items" in node:
        # A default inside of a list's items is a permanent difference for Argo CD, which cannot match the items with those of the manifest.
        schema["items"] = _walk(node["items"], definitions, defaults=False)
        schema["items"].pop("description", None)  # the list has one
        schema.setdefault("x-kubernetes-list-type", "atomic")
    if isinstance(node.get("additionalProperties"), Mapping):
        schema["additionalProperties"] = _walk(node["additionalProperties"], definitions, defaults=False)
    if schema.get("minLength") == 1 and "pattern" in schema and not re.search(schema["pattern"], ""):
        del schema["minLength"]  # the pattern refuses the empty string
    if schema.get("type") == "integer" and "maximum" not in schema:
        schema["format"] = "int64"  # bounds say more than a format, and the CRD is to stay small
    if not defaults or schema.get("default") in (None, [], ""):
        schema.pop("default", None)
    return schema


def _flatten(node: Mapping[str, Any], definitions: Mapping[str, Schema]) -> tuple[Schema, bool]:
    """Inline references, and convert `X | null` to an optional X. Keys beside a reference, such as its description, take precedence."""
    merged, optional = dict(node), False
    if "$ref" in merged:
        target = definitions[merged.pop("$ref").rsplit("/", 1)[1]]
        merged = {**_flatten(target, definitions)[0], **merged}
    if "anyOf" in merged:
        choices = [choice for choice in merged.pop("anyOf") if choice.get("type") != "null"]
        if len(choices) != 1:
            raise TypeError(f"a structural schema has no unions: {choices}")
        merged, optional = {**_flatten(choices[0], definitions)[0], **merged}, True
    return merged, optional
