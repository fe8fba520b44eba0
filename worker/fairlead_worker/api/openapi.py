"""`GET /openapi.json`: the API as an OpenAPI 3.1 document, from the structs that bodies are parsed into and the tables of docs/api.md."""

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from fairlead_worker.api.fields import ENDPOINTS, NOTES, OWN_NOTES
from fairlead_worker.api.refused import HINTS, REFUSALS
from fairlead_worker.api.schema import DetokenizeRequest, LoadLoraRequest, TokenizeRequest, UnloadLoraRequest

BODIES: dict[str, type[msgspec.Struct]] = {
    **ENDPOINTS,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadLoraRequest,
    "/v1/unload_lora_adapter": UnloadLoraRequest,
}
REQUIRED = {"/v1/completions": ["prompt"], "/v1/chat/completions": ["messages"]}
"""Beside what the structs say: left out by a struct so that the refusal can say more than that a field is missing."""
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(routes: Iterable[BaseRoute], version: str = "") -> dict[str, Any]:
    """The document for an application's routes."""
    _, schemas = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    for path, body in BODIES.items():
        _describe(schemas[body.__name__], path)
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route):
            path = route.path.replace(":path}", "}")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fairlead", "version": version or "0", "description": "docs/api.md says what becomes of each field."},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR}},
    }


def _describe(schema: dict[str, Any], path: str) -> None:
    """Add, in place, what the tables say of fields."""
    for name, node in schema["properties"].items():
        if name in REFUSALS:
            node.clear()
            node.update({"enum": [None, *REFUSALS[name].taken], "description": f"Refused otherwise: {REFUSALS[name].why}."})
        elif note := "; ".join(
            filter(None, (HINTS.get(name), OWN_NOTES.get(path, {}).get(name), NOTES.get(name) if path in ENDPOINTS else None))
        ):
            node["description"] = note
    if path in REQUIRED:
        schema["required"] = REQUIRED[path]


def _operation(path: str) -> dict[str, Any]:
    said: dict[str, Any] = {
        "responses": {
            "200": {"description": "the answer"},
            "default": {"description": "an error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}},
        }
    }
    if names := [part[1:-1] for part in path.split("/") if part.startswith("{")]:
        said["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if path in BODIES:
        schema = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        said["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return said
