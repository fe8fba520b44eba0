"""Answers against the OpenAPI document: they have the documented fields, and no others."""

import copy
from typing import Any

import jsonschema


def check(document: dict[str, Any], kind: dict[str, Any] | str, answer: Any, ignored: tuple[str, ...] = ()) -> None:
    """Raise `jsonschema.ValidationError` if an answer is not of this kind: a schema, or the name of one.

    `ignored`: names of schemas that may have further fields.
    """
    components = copy.deepcopy(document["components"])
    for name, schema in components["schemas"].items():
        if "properties" in schema and name not in ignored:
            schema["additionalProperties"] = False
    schema = {"$ref": f"#/components/schemas/{kind}"} if isinstance(kind, str) else kind
    jsonschema.Draft202012Validator({**schema, "components": components}).validate(answer)


def schema_of(
    document: dict[str, Any], path: str, method: str = "post", status: str = "200", media: str = "application/json"
) -> dict[str, Any]:
    """Return the schema of an answer."""
    schema: dict[str, Any] = document["paths"][path][method]["responses"][status]["content"][media]["schema"]
    return schema
