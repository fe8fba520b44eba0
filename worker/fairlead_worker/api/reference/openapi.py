"""`GET /openapi.json`: the API as an OpenAPI 3.1 document, from the request structs and the notes of `fields.py`."""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, get_args

import msgspec
from fastapi.openapi.utils import get_openapi

from fairlead_common.protocols.answer import Answer
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
    document["components"] = {"schemas": _list_answer_schemas(operations) | _list_body_schemas(operations)}
    return document


def _list_answer_schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the schemas of answers, stream events, errors and objects within bodies."""
    kinds = [part for each in operations for kind in (each.answer, each.stream, each.error) for part in get_args(kind) or (kind,) if part]
    _, schemas = msgspec.json.schema_components({*kinds, *ITEMS.values()}, ref_template=REFERENCE)
    for kind in _list_structs(msgspec.Struct):
        if (schema := schemas.get(kind.__name__)) is not None and (issubclass(kind, Answer) or kind in ITEMS.values()):
            _describe_struct(schema, kind)
    return dict(sorted(schemas.items()))


def _list_structs(base: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _list_structs(kind)


def _describe_struct(schema: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Add the strings below the fields, in place. In an answer, every field is there unless its default is UNSET."""
    notes: dict[str, str] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(msgspec.Struct)]):
        notes |= _read_field_notes(base.__module__).get(base.__name__, {})
    for name, node in schema["properties"].items():
        node.pop("default", None)
        if len(values := node.get("enum", ())) == 1:
            del node["enum"]
            node |= _allow_only(values[0])
        if name in notes:
            node["description"] = notes[name]
    if issubclass(kind, Answer):
        absent = {field.encode_name for field in msgspec.structs.fields(kind) if field.default is msgspec.UNSET}
        schema["required"] = [name for name in schema["properties"] if name not in absent]


@lru_cache
def _read_field_notes(module: str) -> dict[str, dict[str, str]]:
    """Return the string below each field of each class of a module."""
    classes = [node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)]
    found: dict[str, dict[str, str]] = {}
    for each in classes:
        for field, note in pairwise(each.body):
            match field, note:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found.setdefault(each.name, {})[name] = inspect.cleandoc(text)
    return found


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
    _, refused, allowed = PROTOCOL_BODIES[path]
    for name, node in properties.items():
        if name in SHARED_FIELDS or (name == "stop" and path == RESPONSES):
            node.update(chat_properties[name])
        elif name in refused:
            _restrict(node, _NOTHING, refused[name])
        elif name in allowed:
            _restrict(node, [None, *allowed[name]], "other values are not supported")
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
