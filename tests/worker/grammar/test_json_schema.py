"""What is rewritten before the compiler sees it, and what is refused with its place. Every text of a grammar follows the given schema."""

import json
import random
from itertools import pairwise
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher
from tests.worker.grammar.serving import Model

from fairlead_worker.grammar import recursion
from fairlead_worker.grammar.checker import check
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.grammar.diagnosis import check_schema
from fairlead_worker.grammar.schema_walk import SchemaError
from fairlead_worker.grammar.strings import use_ascii_classes

OBJECT, INTEGER, STRING = {"type": "object"}, {"type": "integer"}, {"type": "string"}


def tagged(kind: str, /, *, required: bool = False, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"kind": {"const": kind, "default": kind}, **properties}}
    return schema | ({"required": ["kind"]} if required else {})


PETS = {
    "$defs": {"Cat": tagged("cat", lives=INTEGER), "Dog": tagged("dog", name=STRING)},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
}
TREE = {
    "$defs": {
        "Add": tagged("add", left={"$ref": "#/$defs/Any"}, right={"$ref": "#/$defs/Any"}),
        "Leaf": tagged("leaf", value=INTEGER),
        "Any": {"oneOf": [{"$ref": "#/$defs/Add"}, {"$ref": "#/$defs/Leaf"}], "discriminator": {"propertyName": "kind"}},
    },
    "$ref": "#/$defs/Any",
}
COLOURS = {
    "$defs": {
        name: {"type": "object", "properties": {"kind": {"const": kind}, "colour": {"const": name}}}
        for name, kind in (("red", "cat"), ("black", "cat"), ("none", "dog"))
    },
    "discriminator": {"propertyName": "kind"},
    "oneOf": [
        {"discriminator": {"propertyName": "colour"}, "oneOf": [{"$ref": "#/$defs/red"}, {"$ref": "#/$defs/black"}]},
        {"$ref": "#/$defs/none"},
    ],
}
NAMED = {"oneOf": [{"required": [name], "properties": {name: INTEGER}, "additionalProperties": False} | OBJECT for name in ("a", "b")]}
BOTH = {
    "$defs": {"A": {"type": "object", "properties": {"k": {"const": "a"}, "n": {"const": "a"}}}}
    | {each: {"type": "object", "properties": {key: {"const": "x"}}} for each, key in (("K", "k"), ("N", "n"))},
    "type": "object",
    "properties": {
        key: {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": f"#/$defs/{key.upper()}"}], "discriminator": {"propertyName": key}}
        for key in ("k", "n")
    },
}


def unions(depth: int, name: str) -> dict[str, Any]:
    """Return a union of unions with 3 ** depth constants."""
    return {"anyOf": [unions(depth - 1, f"{name}{at}") for at in range(3)]} if depth else {"const": name}


ACCEPTED: dict[str, tuple[Any, list[str], list[str]]] = {
    "discriminator with a default": (PETS, ['{"kind":"cat"}', '{"kind":"dog","name":"x"}'], ["{}", '{"lives":1}', '{"kind":"cow"}']),
    "recursive discriminator": (TREE, ['{"kind":"add","left":{"kind":"leaf"}}'], ['{"kind":"add","left":{}}']),
    "nested discriminators": (
        COLOURS,
        ['{"kind":"cat","colour":"black"}', '{"kind":"dog"}'],
        ["{}", '{"kind":"cat"}', '{"colour":"red"}', '{"kind":"dog","colour":"red"}'],
    ),
    "discriminator by mapping": (
        {"$defs": {name: OBJECT | {"properties": {"kind": STRING}} for name in ("Cat", "Dog")}}
        | {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}
        | {"discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "kitten": "#/$defs/Cat", "dog": "Dog"}}},
        ['{"kind":"cat"}', '{"kind":"kitten"}', '{"kind":"dog"}'],
        ["{}", '{"kind":"cow"}'],
    ),
    "oneOf of types": ({"oneOf": [STRING, {"type": ["null", "integer"]}]}, ['"a"', "1", "null"], ["true", "1.5"]),
    "oneOf of constants": ({"oneOf": [{"const": 1, "title": "one"}, {"enum": ["a", 2]}]}, ["1", "2", '"a"'], ["3"]),
    "oneOf of required constants": (
        {"oneOf": [tagged("a", required=True), tagged("b", required=True)]},
        ['{"kind":"a"}', '{"kind":"b"}'],
        ["{}", '{"kind":"c"}'],
    ),
    "branch of two discriminators": (BOTH, ['{"k":{"k":"a","n":"a"}}', '{"n":{"n":"x"}}'], ['{"k":{"n":"a"}}', '{"n":{"k":"a"}}']),
    "oneOf of many": ({"oneOf": [tagged(f"k{at}", required=True) for at in range(300)]}, ['{"kind":"k299"}'], ["{}", '{"kind":"k"}']),
    "oneOf of names": (NAMED, ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"b":1}']),
    "oneOf beside anyOf": ({"anyOf": [INTEGER, STRING], "oneOf": [INTEGER, {"type": "null"}]}, ["1"], ['"a"', "null"]),
    "oneOf of nested unions": ({"oneOf": [{"anyOf": [STRING, {"type": "null"}]}, INTEGER]}, ["null", "1"], ["{}"]),
    "never": (
        {"type": "object", "properties": {"a": STRING, "b": {"not": {}}}, "additionalProperties": {"not": {}}},
        ['{"a":"x"}', "{}"],
        ['{"b":1}', '{"c":1}'],
    ),
    "not a type": ({"type": ["string", "null", "integer"], "not": {"type": "null"}}, ['"a"', "1"], ["null"]),
    "record": (OBJECT | {"propertyNames": STRING, "additionalProperties": INTEGER}, ['{"x":1}'], ['{"x":"a"}']),
    "record of literal names": (
        OBJECT | {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
        ['{"b":1}'],
        ['{"c":1}'],
    ),
    "record of names by pattern": (OBJECT | {"propertyNames": {"pattern": "^a"}}, ['{"ab":1}'], ['{"b":1}']),
    "record of names by length": (OBJECT | {"propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab":1}'], ['{"a":1}', '{"abcd":1}']),
    "dependentRequired": (
        OBJECT | {"properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
        ["{}", '{"b":1}', '{"a":1,"b":1}'],
        ['{"a":1}', '{"c":1}'],
    ),
    "dependentRequired of another name": (
        OBJECT | {"properties": {"a": INTEGER}, "required": ["a"], "dependentRequired": {"a": ["b"]}},
        ['{"a":1,"b":2}'],
        ['{"a":1}'],
    ),
    "dependentSchemas": (
        OBJECT | {"properties": {"a": INTEGER, "b": {}}, "dependentSchemas": {"a": {"properties": {"b": INTEGER}}}},
        ['{"b":"x"}', '{"a":1,"b":1}'],
        ['{"a":1,"b":"x"}'],
    ),
    "unevaluatedProperties": (OBJECT | {"properties": {"a": INTEGER}, "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
    "uniqueItems that says nothing": ({"type": "array", "uniqueItems": True, "maxItems": 1, "items": INTEGER}, ["[1]"], ["[1,1]"]),
    "multiples": ({"type": "number", "multipleOf": 0.1, "minimum": 0.3, "exclusiveMaximum": 0.7}, ["0.3", "0.6"], ["0.2", "0.7", "0.35"]),
    "bounds of a long": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["5", "-123456789012345678"], ["0.5"]),
    "bounds of a float": ({"type": "number", "minimum": -1.7e308, "exclusiveMaximum": 1.7e308}, ["5", "-0.25"], ["true"]),
    "one multiple": ({"type": "number", "multipleOf": 0.1, "minimum": 0.3, "maximum": 0.3}, ["0.3"], ["0.2", "0.4"]),
    "optional endless branch": (
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}, "properties": {"n": {"$ref": "#/$defs/n"}}}
        | OBJECT,
        ["{}"],
        ['{"n":[', '{"n":'],
    ),
    "recursion that ends": ({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}, ["[[],null]"], ["1"]),
    "required name by pattern": (
        OBJECT | {"required": ["x_a"], "patternProperties": {"^x_": STRING}, "additionalProperties": {"$ref": "#"}},
        ['{"x_a":"b"}'],
        ["{}"],
    ),
    "digits": ({"type": "string", "pattern": r"^\d$"}, ['"5"'], ['"٣"']),
    "annotations of numbers": ({"type": "integer", "format": "int64"}, ["7"], ['"7"']),
    "unknown format": ({"type": "string", "format": "password"}, ['"x"'], ["1"]),
    "network": ({"type": "string", "format": "ipv4network"}, ['"10.0.0.0/8"', '"192.168.4.0/24"'], ['"10.0.0.1/8"', '"x"']),
    "version of a UUID": (
        {"type": "string", "format": "uuid4"},
        ['"f47ac10b-58cc-4372-a567-0e02b2c3d479"'],
        ['"f47ac10b-58cc-1372-a567-0e02b2c3d479"'],
    ),
    "any address": ({"type": "string", "format": "ipvanyaddress"}, ['"10.0.0.1"', '"::1"'], ['"10.0.0"']),
    "pydantic's decimal": (
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ['"-1.50"', '".5"', '"7"'],
        ['"-"', '"."', '""'],
    ),
    "zod's email": (
        {
            "type": "string",
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        },
        ['"a.b@c.org"'],
        ['".a@c.org"', '"a..b@c.org"', '"a.@c.org"'],
    ),
    "zod's duration": (
        {"type": "string", "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"},
        ['"P1W"', '"P1Y2DT3M"', '"PT1H"', '"PT1.5S"'],
        ['"P"', '"P1DT"', '"P1W1D"'],
    ),
    "names of properties are not keywords": (
        OBJECT | {"properties": {"oneOf": INTEGER, "dependentRequired": INTEGER, "not": INTEGER}},
        ['{"oneOf":1,"dependentRequired":2,"not":3}'],
        ['{"oneOf":"a"}'],
    ),
    "data is not a schema": ({"const": {"oneOf": [1], "not": {}}}, ['{"oneOf":[1],"not":{}}'], ["{}"]),
}
DIFFER = (
    "discriminator by mapping",
    "nested discriminators",
    "discriminator with a default",
    "recursive discriminator",
    "multiples",
    "one multiple",
)
"""There jsonschema does not read the discriminator, or divides in binary: 0.3 is no multiple of its 0.1."""


@pytest.mark.parametrize("name", ACCEPTED)
def test_texts_of_a_schema(model: Model, name: str) -> None:
    schema, good, bad = ACCEPTED[name]
    grammar = model.grammar("json", schema)
    assert {text: accepts(model, grammar, text) for text in good + bad} == dict.fromkeys(good, True) | dict.fromkeys(bad, False)
    if name not in DIFFER:
        assert all(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) for text in good)


SELF = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
REFUSED: dict[str, tuple[Any, str, str]] = {
    "oneOf that overlaps": ({"properties": {"x": {"oneOf": [INTEGER, {"type": "number"}]}}}, "/properties/x/oneOf", "anyOf"),
    "oneOf of open objects": ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "/oneOf", "branches 0 and 1"),
    "discriminator that no branch has": (
        {"oneOf": [OBJECT | {"properties": {name: {}}} for name in ("a", "b")], "discriminator": {"propertyName": "kind"}},
        "/oneOf",
        "branches 0 and 1",
    ),
    "oneOf of unions that multiply": ({"oneOf": [unions(7, "a"), unions(7, "b")]}, "/oneOf", "branches 0 and 1"),
    "names that are no strings": (OBJECT | {"propertyNames": {"type": "integer"}}, "/propertyNames", "names"),
    "allOf that is no list": ({"allOf": 3, "anyOf": [{}], "oneOf": [STRING]}, "/allOf", "array"),
    "an object that needs itself": (SELF, "/properties/n/$ref", "refers to itself without an end"),
    "two that need each other": (
        {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}}
        | {"type": "object", "properties": {"x/y": {"$ref": "#/$defs/a"}}, "required": ["x/y"]},
        "/$defs/b/allOf/0/$ref",
        "without an end",
    ),
    "an object of itself": (
        OBJECT | {"additionalProperties": {"$ref": "#"}, "minProperties": 1},
        "/additionalProperties/$ref",
        "without an end",
    ),
    "an object of its properties": (
        OBJECT | {"properties": {"n": {"$ref": "#"}}, "additionalProperties": False, "minProperties": 1},
        "/properties/n/$ref",
        "without an end",
    ),
    "uniqueItems": (
        {"items": {"properties": {"t": {"type": "array", "uniqueItems": True}}}},
        "/items/properties/t/uniqueItems",
        "uniqueItems",
    ),
    "contains": ({"type": "array", "contains": INTEGER}, "/contains", "contains"),
    "if": (OBJECT | {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "/if", "anyOf"),
    "not": ({"properties": {"a": {"not": {"const": 1}}}}, "/properties/a/not", "not"),
    "in a definition": (
        {
            "$defs": {"X/Y": {"type": "object", "properties": {"p": {"type": "string", "pattern": "(?=a)"}}}},
            "items": {"$ref": "#/$defs/X~1Y"},
        },
        "/$defs/X~1Y/properties/p/pattern",
        "look-around",
    ),
    "in a branch of oneOf": ({"oneOf": [INTEGER, {"type": "string", "pattern": "("}]}, "/oneOf/1/pattern", "not a regular expression"),
    "flags": ({"type": "string", "pattern": "/^a$/i"}, "/pattern", "write (?i) at its start"),
    "word boundary": ({"type": "string", "pattern": r"\ba"}, "/pattern", r"\b and \B cannot"),
    "back reference": ({"type": "string", "pattern": r"(a)\1"}, "/pattern", "backreferences"),
    "no such definition": ({"items": {"$ref": "#/$defs/nowhere"}}, "/items/$ref", "names nothing"),
    "another document": ({"items": {"$ref": "https://example.org/x"}}, "/items/$ref", "another document"),
    "unknown type": ({"properties": {"x": {"type": "str"}}}, "/properties/x/type", "str"),
    "bounds": (
        OBJECT | {"properties": {"x": INTEGER | {"minimum": 3, "maximum": 1}}, "required": ["x"]},
        "/properties/x",
        "nothing satisfies",
    ),
    "no schema": ({"type": "object", "properties": {"a": "string"}}, "/properties/a", "must be a schema"),
    "no multiple": ({"type": "number", "multipleOf": 0.25, "minimum": 0.3, "maximum": 0.4}, "/multipleOf", "no multiple of 0.25"),
    "number of properties": (OBJECT | {"properties": {"a": {}}, "minProperties": 1}, "/minProperties", "required"),
    "bound of another type": ({"items": INTEGER | {"minimum": "3"}}, "/items/minimum", "must be a number"),
    "names by format": (OBJECT | {"propertyNames": {"format": "email"}}, "/propertyNames", "names"),
    "nothing at all": (False, "its root", "allows nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_says_where_and_what(model: Model, name: str) -> None:
    schema, place, says = REFUSED[name]
    error = check(model.compiler, Constraint("json", msgspec.json.encode(schema).decode(), "test")).error
    assert error.startswith(f"at {place}: ") and says in error
    assert_no_library_words(error)


def test_an_error_names_the_tool(model: Model) -> None:
    schemas = [OBJECT, {"type": "object", "properties": {"t": {"type": "array", "uniqueItems": True}}}]
    fields = ("tools[3].function.parameters", "tools[5].function.parameters")
    calls = {"tools": [{"name": f"f{at}", "schema": each} for at, each in enumerate(schemas)], "one": False}
    tags = {"structures": [{"begin": "<x>", "schema": each, "end": "</x>"} for each in schemas], "triggers": ["<x>"]}
    for kind, document in (("calls", calls), ("structural_tag", tags)):
        verdict = check(model.compiler, Constraint(kind, json.dumps(document), "tools", fields=fields))  # type: ignore[arg-type]
        assert verdict.field == fields[1] and verdict.error.startswith("at /properties/t/uniqueItems: ")
        assert_no_library_words(verdict.error)


def test_an_error_names_the_structure(model: Model) -> None:
    nested = {"type": "tag", "begin": "<x>", "content": {"type": "json_schema", "json_schema": SELF}, "end": "</x>"}
    error = check(model.compiler, Constraint("structural_tag", json.dumps({"format": nested}), "response_format")).error
    assert error.startswith("format.content.json_schema: at /properties/n/$ref: ")


def test_classes_of_an_expression_are_ascii(model: Model) -> None:
    for expression, good, bad in (
        (r"\d\w", "5a", "٣a"),
        (r"[\d.]", "5", "٣"),
        (r"[^\d]", "a", "5"),
        (r"\\d", r"\d", "5"),
        (r"\[\d", "[5", "[٣"),
        (r"[\w-z]", "-", "`"),
        (r"[+-\d]", "-", ","),
    ):
        grammar = model.grammar("regex", expression)
        assert accepts(model, grammar, good) and not accepts(model, grammar, bad), expression
    assert use_ascii_classes("a\\") == "a\\"


def test_each_reference_of_a_chain_is_read_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    ends = recursion._ends

    def count(node: Any, endless: frozenset[str]) -> bool:
        read.append(node)
        return ends(node, endless)

    monkeypatch.setattr(recursion, "_ends", count)
    names = [f"d{at:03}" for at in range(200)]
    chain = {name: {"type": "array", "items": {"$ref": f"#/$defs/{after}"}, "minItems": 1} for name, after in pairwise(names)}
    assert recursion.find_endless({"$defs": chain | {names[-1]: {"type": "null"}}}) == frozenset()
    assert len(read) < 10 * len(names)


def test_the_search_for_an_error_does_not_compile_other_definitions() -> None:
    large = {f"d{at}": {"enum": [str(each) for each in range(100)]} for at in range(100)}
    given = {"$defs": large, "properties": {f"p{at}": STRING for at in range(200)} | {"last": {"type": "array", "uniqueItems": True}}}
    compiled: list[int] = []

    def compile(schema: Any) -> str:
        compiled.append(len(json.dumps(schema)))
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))

    with pytest.raises(SchemaError, match="/properties/last/uniqueItems"):
        check_schema(given, given, compile)
    assert sum(compiled) < 2 * len(json.dumps(given))


def assert_no_library_words(error: str) -> None:
    assert not any(word in error for word in ("coerce", "%json", "Unimplemented", "llguidance", "start:", "x-part", "lark"))


def accepts(model: Model, grammar: str, text: str) -> bool:
    matcher, tokens = model.compiler.matcher(grammar), model.tokens(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


JUNK: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "x", "#", [], [1], [{}], {}, {"type": 7}, {"$ref": ["#"]}, [["a"]])


@pytest.mark.parametrize("seed", range(40))
def test_junk_in_a_schema_is_refused_in_its_terms(model: Model, seed: int) -> None:
    chance = random.Random(seed)
    schema = json.loads(
        json.dumps(chance.choice([each[0] for each in (*ACCEPTED.values(), *REFUSED.values()) if isinstance(each[0], dict)]))
    )
    node = schema
    while (inner := [each for each in node.values() if isinstance(each, dict) and each]) and chance.random() < 0.7:
        node = chance.choice(inner)
    node[chance.choice([*node, "$ref", "oneOf", "type", "required", "multipleOf", "propertyNames"])] = chance.choice(JUNK)
    error = check(model.compiler, Constraint("json", msgspec.json.encode(schema).decode(), "test")).error
    assert not error or error.startswith("at ") or "refers to itself" in error or "allows no text" in error
    assert_no_library_words(error)
