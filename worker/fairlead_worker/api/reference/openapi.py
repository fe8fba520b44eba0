"""`GET /openapi.json`: the API as an OpenAPI 3.1 document, from the request structs and the notes of `fields.py`."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from fairlead_common.protocols.fields import SHARED_FIELDS
from fairlead_common.protocols.paths import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RERANKS, RESPONSES
from fairlead_common.protocols.paths import POOLED as POOLED_PATHS
from fairlead_worker.api.generation.unsupported_fields import HINTS, REFUSALS
from fairlead_worker.api.protocols.field_table import BODIES as PROTOCOL_BODIES
from fairlead_worker.api.protocols.field_table import NOTES as PROTOCOL_NOTES
from fairlead_worker.api.reference.fields import ENDPOINTS, NOTES, OWN_NOTES, POOLED_BY_PATH, POOLED_NOTES, TOKEN_BY_PATH, TOKEN_NOTES
from fairlead_worker.api.schema import ChatRequest, LoadLoraRequest, UnloadLoraRequest

BODIES: dict[str, type[msgspec.Struct]] = {
    **ENDPOINTS,
    **{path: body for path, (body, _) in PROTOCOL_BODIES.items()},
    COUNT_TOKENS: PROTOCOL_BODIES[MESSAGES][0],
    **{path: body for paths, body in POOLED_BY_PATH.items() for path in paths},
    **{path: body for paths, body in TOKEN_BY_PATH.items() for path in paths},
    "/v1/load_lora_adapter": LoadLoraRequest,
    "/v1/unload_lora_adapter": UnloadLoraRequest,
}
REQUIRED: dict[str, list[str]] = {
    COMPLETIONS: ["prompt"],
    CHAT: ["messages"],
    RESPONSES: ["input"],
    MESSAGES: ["messages", "max_tokens"],
    COUNT_TOKENS: ["messages"],
    **{path: ["query", "documents"] for path in RERANKS},
}
"""Required fields. The structs make them optional, so that the error can say more than that a field is missing, and because one struct
serves two paths."""
_NOTHING: list[Any] = [None, False, [], {}]
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def build_document(routes: Iterable[BaseRoute], version: str = "") -> dict[str, Any]:
    """Return the document for an application's routes."""
    _, schemas = msgspec.json.schema_components(set(BODIES.values()), ref_template="#/components/schemas/{name}")
    chat_properties = schemas[ChatRequest.__name__]["properties"]
    for path, body in BODIES.items():
        properties = schemas[body.__name__]["properties"]
        if path in PROTOCOL_BODIES:
            _describe_protocol(properties, path, chat_properties)
        elif path in ENDPOINTS:
            _describe(properties, HINTS, OWN_NOTES[path], NOTES)
        elif path in POOLED_PATHS:
            _describe(properties, POOLED_NOTES)
        elif (path,) in TOKEN_BY_PATH:
            _describe(properties, TOKEN_NOTES)
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route):
            path = route.path.replace(":path}", "}")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fairlead", "version": version or "0", "description": "The documentation says how far each field is supported."},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR}},
    }


def _describe(properties: dict[str, Any], *notes: Mapping[str, str]) -> None:
    """Add the tables' notes to fields, in place."""
    for name, node in properties.items():
        if name in REFUSALS:
            _restrict(node, [None, *REFUSALS[name].accepted], REFUSALS[name].reason)
        elif note := "; ".join(table[name] for table in notes if name in table):
            node["description"] = note


def _describe_protocol(properties: dict[str, Any], path: str, chat_properties: dict[str, Any]) -> None:
    """Add the notes of another API's fields. A field that the chat's rules check gets the chat's schema."""
    module = PROTOCOL_BODIES[path][1]
    for name, node in properties.items():
        if name in SHARED_FIELDS or (name == "stop" and path == RESPONSES):
            node.update(chat_properties[name])
        elif name in module.REFUSED:
            _restrict(node, _NOTHING, module.REFUSED[name])
        elif name in module.ALLOWED:
            _restrict(node, [None, *module.ALLOWED[name]], "other values are not supported")
        if name in PROTOCOL_NOTES[path]:
            node["description"] = PROTOCOL_NOTES[path][name]


def _restrict(node: dict[str, Any], values: list[Any], why: str) -> None:
    node.clear()
    node.update({"enum": values, "description": f"Refused otherwise: {why}."})


def _operation(path: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "the answer"},
            "default": {"description": "an error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}},
        }
    }
    if names := [part[1:-1] for part in path.split("/") if part.startswith("{")]:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if path in BODIES:
        schema: dict[str, Any] = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        if path in REQUIRED:
            schema["required"] = REQUIRED[path]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
