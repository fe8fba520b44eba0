"""`GET /openapi.json`: the API as an OpenAPI 3.1 document, from the request structs and the notes of `fields.py`."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from fairlead_common.protocols.fields import SHARED_FIELDS
from fairlead_common.protocols.paths import POOLED as POOLED_PATHS
from fairlead_common.protocols.paths import RESPONSES
from fairlead_worker.api.generation.unsupported_fields import HINTS, REFUSALS
from fairlead_worker.api.protocols.field_table import BODIES as PROTOCOL_BODIES
from fairlead_worker.api.protocols.field_table import NOTES as PROTOCOL_NOTES
from fairlead_worker.api.reference.fields import ENDPOINTS, LORA_NOTES, NOTES, OWN_NOTES, POOLED_NOTES, TOKEN_BY_PATH, TOKEN_NOTES
from fairlead_worker.api.reference.nested import ITEMS, describe_lists
from fairlead_worker.api.routes.operation import Operation, build_router
from fairlead_worker.api.schema import ChatRequest, LoadLoraRequest, UnloadLoraRequest

REFERENCE = "#/components/schemas/{name}"
DESCRIPTION = "The documentation says how far each field is supported."
_NOTHING: list[Any] = [None, False, [], {}]


def build_document(apis: Mapping[str, Iterable[Operation]], version: str = "") -> dict[str, Any]:
    """Return the document of the operations of each API."""
    operations = [each for group in apis.values() for each in group]
    document = get_openapi(
        title="Fairlead",
        version=version or "0",
        description=DESCRIPTION,
        routes=[route for tag, group in apis.items() for route in build_router(tag, group, head=False).routes],
        tags=[{"name": tag} for tag in apis],
    )
    document["components"]["schemas"] |= _list_answer_schemas(operations) | _list_body_schemas(operations)
    return document


def _list_answer_schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the schemas of stream events, errors and objects within bodies, which FastAPI does not know."""
    events = [model for each in operations for model in (each.stream, each.error) if model is not None]
    models = dict.fromkeys((*events, *ITEMS.values()))
    _, found = models_json_schema([(model, "serialization") for model in models], ref_template=REFERENCE.format(name="{model}"))
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def _list_body_schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the schemas of request bodies, with the notes of their fields."""
    bodies = {each.path: each.body for each in operations if each.body is not None}
    _, schemas = msgspec.json.schema_components(set(bodies.values()), ref_template=REFERENCE)
    for path, body in bodies.items():
        properties = schemas[body.__name__]["properties"]
        if path in PROTOCOL_BODIES:
            _describe_protocol(properties, path, schemas[ChatRequest.__name__]["properties"])
        elif path in ENDPOINTS:
            _describe(properties, HINTS, OWN_NOTES[path], NOTES)
        elif path in POOLED_PATHS:
            _describe(properties, POOLED_NOTES)
        elif (path,) in TOKEN_BY_PATH:
            _describe(properties, TOKEN_NOTES)
        elif body in (LoadLoraRequest, UnloadLoraRequest):
            _describe(properties, LORA_NOTES)
    for name, schema in schemas.items():
        describe_lists(name, schema["properties"])
    return schemas


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


def _restrict(node: dict[str, Any], values: Iterable[Any], why: str) -> None:
    node.clear()
    node.update({"anyOf": [_allow_only(value) for value in values], "description": f"Refused otherwise: {why}."})


def _allow_only(value: Any) -> dict[str, Any]:
    """Return the schema of one value, in a form that generators of clients can read: they take no list of values of several types."""
    match value:
        case None:
            return {"type": "null"}
        case []:
            return {"type": "array", "items": {}, "maxItems": 0}
        case [only]:
            return {"type": "array", "items": _allow_only(only), "minItems": 1, "maxItems": 1}
        case {}:
            return {"type": "object", "maxProperties": 0}
        case bool():
            return {"type": "boolean", "const": value}
        case str():
            return {"type": "string", "const": value}
        case _:
            return {"type": "number", "const": value}
