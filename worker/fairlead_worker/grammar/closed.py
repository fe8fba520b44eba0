"""Close the objects of a JSON schema that does not say whether they have other properties.

JSON Schema lets every object have more properties than its schema lists. Trained models use that: in an open object SmolLM2 went on to
invent properties until the token limit. xgrammar (vLLM's default) closes such objects too. An answer for the closed schema
follows the given one: where that would not be sure, as in `oneOf`, objects stay open.
"""

from collections.abc import Mapping
from typing import Any

from fairlead_worker.grammar.schema_walk import DATA, NAMED

_FURTHER = ("anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas")
"""Keywords beside `properties` that can name further properties."""
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties")
_OF_NAMES = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "prefixItems")
"""Not `oneOf`: an answer for one closed branch can follow two of the open ones. `json_schema.py` turns branches that exclude each other
into `anyOf` before."""


def close_objects(schema: Any) -> Any:
    """Return `schema` with `additionalProperties: false` in objects with `properties`, unless a keyword of theirs asks for others.

    A document that composes an object of several schemas stays as it is: `additionalProperties` of one does not see the others.
    """
    return schema if _composes(schema) else _close(schema)


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in _OF_NAMES:
        if isinstance(names := schema.get(key), dict):
            closed[key] = {name: _close(each) for name, each in names.items()}
    for key in _LISTS:
        if isinstance(parts := schema.get(key), list):
            closed[key] = [_close(each) for each in parts]
    if isinstance(items := schema.get("items"), Mapping):
        closed["items"] = _close(items)
    properties = schema.get("properties")
    if isinstance(properties, dict) and not any(key in schema for key in _OPEN) and _lists_required(schema, properties):
        closed["additionalProperties"] = False
    return closed


def _lists_required(schema: dict[str, Any], properties: dict[str, Any]) -> bool:
    dependent = schema.get("dependentRequired", {})
    lists = [schema.get("required", []), *(dependent.values() if isinstance(dependent, dict) else ())]
    return all(isinstance(names, list) and all(name in properties for name in names if isinstance(name, str)) for names in lists)


def _composes(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_composes, schema))
    if not isinstance(schema, dict):
        return False
    if "allOf" in schema or ("properties" in schema and any(key in schema for key in _FURTHER)):
        return True
    return any(_composes(_parts(key, value)) for key, value in schema.items() if key not in DATA)


def _parts(key: str, value: Any) -> Any:
    """Return the value of a keyword; without the names if it has schemas by name."""
    return list(value.values()) if key in NAMED and isinstance(value, dict) else value
