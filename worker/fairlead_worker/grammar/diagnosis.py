"""Find the place in a JSON schema that the compiler refuses, and say it in the terms of the schema.

llguidance names neither the place nor what to do. So the smallest part of the schema that it refuses for the same reason is searched.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec
from llguidance import LLMatcher

from fairlead_common.truncate import truncate
from fairlead_worker.grammar.schema_walk import SchemaError, children, join, reference_keys, resolve

MAX_TRIED_BYTES = 1 << 20
"""Bytes of the parts that are compiled in search of an error. 1 MiB takes about 1 s."""
MAX_QUOTED = 120
"""Characters of the schema that a message repeats, beside those of its place."""
_HINTS = {
    "uniqueItems": "check the answer's items for equal ones instead",
    "contains": "ask for the item in a property or a prefixItems entry of its own instead",
    "not": "list what is allowed instead, with enum, pattern or type",
    "if": "write the cases as anyOf, each with a const that tells it apart",
    "propertyNames": "only enum, const, pattern, minLength and maxLength of names can be enforced, without other properties",
    "unevaluatedProperties": "list all properties in one schema with additionalProperties: false instead",
    "unevaluatedItems": "list all items in one schema with items: false instead",
    "$dynamicRef": "refer to the definition with $ref instead",
}
"""What the client can do, by keyword. `then`, `else`, `minContains` and `maxContains` depend on theirs."""
_REQUIRED = re.compile(r"required property '(.*)' is unsatisfiable")
_KEYWORD = re.compile(r"Unimplemented keys: \[(.*)\]", re.DOTALL)
_MESSAGES = (
    (r".*lookarounds not supported.*; Word.*", "pattern", r"\\b and \\B cannot be enforced; write the pattern without"),
    (
        r".*lookarounds not supported.*; (?:Start|End).*",
        "pattern",
        "^ and $ can be enforced only at the ends of the pattern, without the modifier (?m); "
        "slashes and flags around it (/…/i) are part of the text: write (?i) at its start instead",
    ),
    (r".*look-?arounds?\b.*", "pattern", "look-around cannot be enforced; write the pattern without"),
    (r".*backreferences.*", "pattern", "backreferences cannot be enforced; write the pattern without"),
    (r".*regex parse error:.*\berror: (.*)", "pattern", r"is not a regular expression: \1"),
    (r"Pointer '(.*)' does not exist", "$ref", r"#\1 names nothing in the schema"),
    (r"Resource '(.*?)' .*", "$ref", r"\1 is another document; references must stay within the schema (#/$defs/…)"),
    (
        r"min/maxProperties only supported.*",
        "minProperties",
        "minProperties and maxProperties can be enforced only if all listed properties are required",
    ),
    (r"Unsatisfiable schema: anyOf is empty", "enum", "nothing satisfies this: it lists no value"),
    (r"Unsatisfiable schema: (.*)", "", r"nothing satisfies this: \1"),
    (r"Invalid type: (.*)", "type", r"\1 is no JSON type; types are null, boolean, integer, number, string, array, object"),
    (r"Expected f64 for '(.*)', got (.*)", r"\1", r"must be a number, not \2"),
    (r"Expected positive integer for '(.*)', got (.*)", r"\1", r"must be a whole number of at least 0, not \2"),
    (r"Expected (\w+) for '(.*)', got (.*)", r"\2", r"must be of type \1, not \3"),
    (r"(\w+) must be an array", r"\1", "must be an array"),
    (r"recursion limit exceeded.*", "", "schemas within schemas are too deep"),
)
"""(llguidance's message, keyword, ours)."""


def check_schema(prepared: Any, given: Any, compile: Callable[[Any], str]) -> None:
    """Raise SchemaError if a schema does not compile. `prepared`: `given`, rewritten. `compile`: returns a schema's grammar."""
    problem = _problem(prepared, compile)
    if problem:
        keys, problem = _locate(prepared, problem, compile)
        pointer, node = _translate(keys, given)
        keyword, message = _describe(problem, node)
        raise SchemaError(join(pointer, keyword) if isinstance(node, dict) and keyword in node else pointer, message)


def _problem(schema: Any, compile: Callable[[Any], str]) -> str:
    try:
        message = LLMatcher.validate_grammar(compile(schema))
    except ValueError as error:
        message = str(error)
    return message.replace("<non-verbose/>", "").partition("while processing json-schema:")[0].strip()


def _locate(root: Any, problem: str, compile: Callable[[Any], str]) -> tuple[tuple[str | int, ...], str]:
    """Return the keys of the smallest part of a schema that is refused for the same reason, and the reason."""
    definitions = {key: root[key] for key in ("$schema", "$id", "$defs", "definitions") if key in root} if isinstance(root, dict) else {}
    place: tuple[str | int, ...] = ()
    node, seen, left = root, set[str](), MAX_TRIED_BYTES
    while isinstance(node, dict):
        reference = str(node.get("$ref"))
        target = resolve(root, reference)
        followed = [(tuple(reference_keys(reference)), target)] if target is not None and reference not in seen else []
        options = [((*place, *keys), each) for keys, each in children(node) if keys[0] not in ("$defs", "definitions", "x-part")]
        for keys, each in [*options, *followed]:
            part = _document(each, definitions)
            left -= len(msgspec.json.encode(part))
            if left < 0:
                return place, problem
            if _problem(part, compile) == problem:
                place, node = keys, each
                if followed and keys == followed[0][0]:
                    seen.add(reference)
                break
        else:
            properties = node.get("properties")
            name = found[1] if (found := _REQUIRED.search(problem)) else None
            if name is None or not isinstance(properties, dict) or not isinstance(properties.get(name), dict):
                return place, problem
            place, node = (*place, "properties", name), properties[name]
            problem = _problem(_document(node, definitions), compile) or problem
    return place, problem


def _document(part: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a schema as a schema of its own. Without references it needs no definitions, which can be large."""
    return definitions | {"$ref": "#/x-part", "x-part": part} if b'"$ref"' in msgspec.json.encode(part) else part


def _translate(keys: tuple[str | int, ...], given: Any) -> tuple[str, Any]:
    """Return (JSON pointer, node) in the given schema for a place in the rewritten one: as far as both have it."""
    pointer, node = "", given
    for key in keys:
        if isinstance(node, dict) and key == "anyOf" and key not in node and "oneOf" in node:
            key = "oneOf"
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and str(key).isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            break
        pointer = join(pointer, key)
    return pointer, node


def _describe(problem: str, node: Any) -> tuple[str, str]:
    """Return (keyword, what is wrong and what to do)."""
    if found := _KEYWORD.search(problem):
        names = re.findall(r'"([^"]+)"', found[1])
        name = next((name for name in names if name in _HINTS), names[0])
        return name, f"{name} cannot be enforced; {_HINTS.get(name, 'leave it out')}"
    for pattern, keyword, message in _MESSAGES:
        if found := re.fullmatch(pattern, problem, re.DOTALL):
            return found.expand(keyword), _fill(message, found)
    return "", truncate(" ".join(problem.split()), MAX_QUOTED)


def _fill(message: str, found: re.Match[str]) -> str:
    """Return a message with the groups of what was found, each shortened."""
    return re.sub(r"\\(\\|\d)", lambda at: "\\" if at[1] == "\\" else truncate(" ".join(found[int(at[1])].split()), MAX_QUOTED), message)
