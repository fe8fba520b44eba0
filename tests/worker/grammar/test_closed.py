"""Objects are closed unless their schema asks for more. The closed schema allows nothing that the given one forbids."""

from typing import Any

import jsonschema
import pytest

from fairlead_worker.grammar.closed import close_objects

A, INTEGER = {"a": {"type": "integer"}}, {"type": "integer"}
LINKED = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "$defs": {"node": {"properties": A}}}


@pytest.mark.parametrize(
    ("schema", "allowed", "closed"),
    [
        ({"properties": A}, {"a": 1}, {"a": 1, "b": 2}),
        ({"properties": {}}, {}, {"b": 2}),
        ({"properties": {"o": {"properties": A}}}, {"o": {"a": 1}}, {"o": {"b": 1}}),
        ({"items": {"properties": A}}, [{"a": 1}], [{"b": 1}]),
        ({"prefixItems": [{"properties": A}]}, [{"a": 1}, 5], [{"b": 1}]),
        ({"anyOf": [{"type": "object", "properties": A}, {"type": "string"}]}, "x", {"b": 1}),
        ({"properties": {"allOf": INTEGER, "o": {"properties": A}}}, {"allOf": 1}, {"b": 2}),
        ({"properties": A, "default": {"allOf": 1}}, {"a": 1}, {"b": 2}),
        (LINKED, {"next": {"a": 1}}, {"next": {"b": 1}}),
    ],
)
def test_what_the_schema_does_not_mention_is_closed(schema: dict[str, Any], allowed: Any, closed: Any) -> None:
    assert valid(schema, allowed) and valid(schema, closed)
    assert valid(close_objects(schema), allowed) and not valid(close_objects(schema), closed)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": A, "additionalProperties": True},
        {"properties": A, "additionalProperties": INTEGER},
        {"properties": A, "patternProperties": {"^b": INTEGER}},
        {"properties": A, "minProperties": 2},
        {"properties": A, "required": ["a", "b"]},
        {"allOf": [{"properties": A}, {"properties": {"b": INTEGER}}]},
        {"properties": A, "anyOf": [{"required": ["a"]}, {"properties": {"b": INTEGER}}]},
        {"properties": A, "$ref": "#/$defs/more", "$defs": {"more": {"properties": {"b": INTEGER}}}},
    ],
)
def test_what_it_does_mention_stays(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema and valid(schema, {"a": 1, "b": 2})


def test_an_answer_for_one_branch_of_one_of_does_not_follow_two() -> None:
    one, other = {"properties": A, "required": ["a"]}, {"properties": {"b": INTEGER}}
    schema = {"oneOf": [one, other]}
    closed_branches = {"oneOf": [each | {"additionalProperties": False} for each in (one, other)]}
    assert valid(closed_branches, {"a": 1}) and not valid(schema, {"a": 1})
    assert close_objects(schema) == schema


def valid(schema: dict[str, Any], document: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(document))
