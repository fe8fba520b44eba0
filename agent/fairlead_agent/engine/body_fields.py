"""The fields of the engine's request bodies, from its OpenAPI document. Pure."""

from typing import Any, Final

_JSON: Final = "application/json"
_MAX_DEPTH: Final = 8


def read_body_fields(document: Any) -> dict[str, frozenset[str]]:
    """Return the fields of the JSON bodies that can be posted, by path. Of alternative bodies, only the fields that all have count."""
    found: dict[str, frozenset[str]] = {}
    paths = _get(document, "paths")
    for path, item in paths.items() if isinstance(paths, dict) else ():
        schema = _get(item, "post", "requestBody", "content", _JSON, "schema")
        if isinstance(schema, dict):
            found[path] = _fields(schema, document, 0)
    return found


def _fields(schema: Any, document: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return frozenset()
    if isinstance(name := schema.get("$ref"), str):
        return _fields(_get(document, *name.removeprefix("#/").split("/")), document, depth + 1)
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(alternatives, list) and alternatives:
            return frozenset.intersection(*(_fields(each, document, depth + 1) for each in alternatives))
    if isinstance(parts := schema.get("allOf"), list):
        return frozenset().union(*(_fields(each, document, depth + 1) for each in parts))
    properties = schema.get("properties")
    return frozenset(properties) if isinstance(properties, dict) else frozenset()


def _get(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value
