"""Rewrite a client's JSON schema to one that llguidance enforces. Every document of the new schema follows the given one.

What no grammar can enforce stays, and the compiler refuses it; `diagnosis.py` says where it is.
"""

import math
from decimal import Decimal
from typing import Any

from fairlead_worker.grammar.closed import close_objects
from fairlead_worker.grammar.one_of import Branches
from fairlead_worker.grammar.recursion import find_cycle, find_endless
from fairlead_worker.grammar.schema_walk import DATA, NAMED, Node, SchemaError, add_all_of, children, join
from fairlead_worker.grammar.strings import rewrite_string

_TYPES = ("null", "boolean", "string", "array", "object", "number")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_DECIMAL = 1e15
"""Larger bounds are left to the compiler."""
MAX_BOUND = 10**18
"""The compiler knows no lower bounds below those of 64 bits, as of a Java long (-2^63) or a float. Answers keep within this one."""
MAX_MULTIPLES = 512
"""Multiples that are listed one by one."""
_COMPOSING = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "not", "dependentSchemas")


def prepare_schema(schema: Any) -> Any:
    """Return the schema for the compiler. Raise SchemaError with the place in `schema`."""
    if schema is False:
        raise SchemaError("", "the schema false allows nothing")
    if schema is True:
        return {}
    endless = find_endless(schema)
    if (cycle := find_cycle(schema, endless)) is not None:
        raise SchemaError(
            cycle,
            "the schema refers to itself without an end, so no answer could follow it: make a property on the way optional, "
            "or allow null or an empty array",
        )
    rewriter = _Rewriter(schema, endless)
    rewritten = close_objects(rewriter.rewrite(schema, ""))
    if rewritten is False:
        raise SchemaError("", "not: {} allows nothing")
    return _add_dependencies(rewritten) if rewriter.has_dependencies else rewritten


class _Rewriter:
    """Copies a schema, and changes what llguidance does not know."""

    def __init__(self, root: Any, endless: frozenset[str]) -> None:
        self.has_dependencies = False
        self._endless = endless
        self._branches = _compare_branches(root)

    def rewrite(self, node: Any, pointer: str) -> Any:
        if isinstance(node, list):
            return [self.rewrite(each, join(pointer, at)) for at, each in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if isinstance(node.get("$ref"), str) and node["$ref"] in self._endless:
            return False
        new: Node = {}
        for key, value in node.items():
            if key in NAMED and isinstance(value, dict):
                for name, each in value.items():
                    if key == "properties" and not isinstance(each, dict | bool):
                        raise SchemaError(join(pointer, key, name), 'must be a schema, such as {"type": "string"}, or true or false')
                new[key] = {name: self.rewrite(each, join(pointer, key, name)) for name, each in value.items()}
            else:
                new[key] = value if key in DATA else self.rewrite(value, join(pointer, key))
        if "not" in new and new["not"] in ({}, True):
            return False
        _drop_what_says_nothing(new)
        _rename_unevaluated(new)
        _rewrite_not(new)
        _rewrite_property_names(new)
        _limit_bounds(new)
        _list_multiples(new, pointer)
        rewrite_string(new)
        if "oneOf" in new:
            branches = new.pop("oneOf")
            if "anyOf" in new:
                add_all_of(new, {"anyOf": branches})
            else:
                new["anyOf"] = branches
        if (names := self._branches.required.get(id(node))) is not None:
            given = new["required"] if isinstance(new.get("required"), list) else []
            new["required"] = [*sorted(names), *(each for each in given if each not in names)]
        if (tag := self._branches.tags.get(id(node))) is not None:
            add_all_of(new, tag)
        self.has_dependencies |= "dependentRequired" in new or "dependentSchemas" in new
        return new


def _compare_branches(root: Any) -> Branches:
    """Return what discriminators say of the branches of each `oneOf`. Raise SchemaError for one that overlaps."""
    found: list[tuple[str, Any]] = [("", root)]
    for pointer, node in found:
        found += [(join(pointer, *keys), each) for keys, each in children(node) if isinstance(each, dict)]
    unions = [(pointer, node) for pointer, node in found if isinstance(node, dict) and isinstance(node.get("oneOf"), list)]
    branches = Branches(root)
    for _, node in unions:
        branches.require_discriminator(node)
    for pointer, node in unions:
        branches.check_disjoint(node["oneOf"], pointer)
    return branches


def _drop_what_says_nothing(node: Node) -> None:
    if node.get("uniqueItems") is False or node.get("maxItems") in (0, 1):
        node.pop("uniqueItems", None)
    if node.get("minContains") == 0 and "maxContains" not in node:
        node.pop("contains", None)
        node.pop("minContains")
    if "not" in node and node["not"] is False:
        del node["not"]
    if "then" not in node and "else" not in node:
        node.pop("if", None)
    if node.get("propertyNames") in (True, {}, {"type": "string"}):
        del node["propertyNames"]


def _rename_unevaluated(node: Node) -> None:
    """Without other schemas in the same place, what they have not evaluated is what this node has not."""
    if any(key in node for key in _COMPOSING):
        return
    if "unevaluatedProperties" in node:
        rest = node.pop("unevaluatedProperties")
        node.setdefault("additionalProperties", rest)
    if "unevaluatedItems" in node:
        rest = node.pop("unevaluatedItems")
        node.setdefault("additionalItems" if isinstance(node.get("items"), list) else "items", rest)


def _rewrite_not(node: Node) -> None:
    """Turn `not: {"type": …}` into the other types."""
    given = node.get("not")
    if not isinstance(given, dict) or set(given) - {"title", "description"} != {"type"}:
        return
    excluded = given["type"] if isinstance(given["type"], list) else [given["type"]]
    own = node.get("type", list(_TYPES))
    own = own if isinstance(own, list) else [own]
    if "integer" in excluded and "number" in own and "number" not in excluded:
        return
    if "number" in excluded:
        excluded = [*excluded, "integer"]
    del node["not"]
    node["type"] = [each for each in own if each not in excluded]


def _rewrite_property_names(node: Node) -> None:
    """Turn `propertyNames` into `properties` or `patternProperties`: records of zod, and dictionaries of pydantic with literal keys."""
    names = node.get("propertyNames")
    if not isinstance(names, dict) or "patternProperties" in node or names.get("type", "string") != "string":
        return
    rest = node.get("additionalProperties", True)
    properties = node["properties"] if isinstance(node.get("properties"), dict) else {}
    rules = {key: value for key, value in names.items() if key not in ("type", "title", "description", "$schema")}
    listed = [rules["const"]] if set(rules) == {"const"} else rules.get("enum") if set(rules) == {"enum"} else None
    if isinstance(listed, list):
        allowed = [name for name in listed if isinstance(name, str)]
        node["properties"] = {name: properties.get(name, rest) for name in allowed}
    elif set(rules) == {"pattern"} and isinstance(rules["pattern"], str) and not properties:
        node["patternProperties"] = {rules["pattern"]: rest}
    elif set(rules) <= {"minLength", "maxLength"} and all(isinstance(each, int) for each in rules.values()) and not properties:
        most = rules.get("maxLength", "")
        node["patternProperties"] = {rf"^[\s\S]{{{rules.get('minLength', 0)},{most}}}$": rest}
    else:
        return
    node["additionalProperties"] = False
    del node["propertyNames"]


def _limit_bounds(node: Node) -> None:
    for keys, sign in (_BOUNDS[::2], -1), (_BOUNDS[1::2], 1):
        for key in keys:
            if isinstance(node.get(key), int | float) and sign * node[key] > MAX_BOUND and not {"const", "enum"} & node.keys():
                node[key] = sign * MAX_BOUND


def _list_multiples(node: Node, pointer: str) -> None:
    """List the multiples of a decimal fraction within two bounds. llguidance divides in binary: it takes 0.3 for no multiple of 0.1."""
    step, given = node.get("multipleOf"), node.get("type")
    bounds = {key: node[key] for key in _BOUNDS if key in node}
    if not isinstance(step, float) or step <= 0 or given not in ("number", "integer") or "enum" in node or "const" in node:
        return
    if not all(isinstance(each, int | float) and not isinstance(each, bool) and abs(each) < MAX_DECIMAL for each in bounds.values()):
        return
    exact = Decimal(repr(step))
    steps = {key: Decimal(repr(bound)) / exact for key, bound in bounds.items()}
    lows = [math.ceil(steps["minimum"])] if "minimum" in steps else []
    lows += [math.floor(steps["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in steps else []
    highs = [math.floor(steps["maximum"])] if "maximum" in steps else []
    highs += [math.ceil(steps["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in steps else []
    if not lows or not highs or min(highs) - max(lows) >= MAX_MULTIPLES:
        return
    values = [count * exact for count in range(max(lows), min(highs) + 1)]
    listed = [int(each) if each == int(each) else float(each) for each in values if given == "number" or each == int(each)]
    if not listed:
        raise SchemaError(join(pointer, "multipleOf"), f"no multiple of {step} is within the bounds")
    for key in ("multipleOf", *bounds):
        del node[key]
    node["enum"] = listed


def _add_dependencies(node: Any) -> Any:
    """Express `dependentRequired` and `dependentSchemas` by `anyOf`: without the property, or with what it asks for.

    It runs on closed objects, because `anyOf` beside `properties` keeps objects open.
    """
    if isinstance(node, list):
        return list(map(_add_dependencies, node))
    if not isinstance(node, dict):
        return node
    new: Node = {}
    for key, value in node.items():
        if key in NAMED and isinstance(value, dict):
            new[key] = {name: _add_dependencies(each) for name, each in value.items()}
        else:
            new[key] = value if key in DATA else _add_dependencies(value)
    rules: list[tuple[str, Any]] = []
    if isinstance(wanted := new.get("dependentRequired"), dict):
        rules += [(name, {"required": [name, *each]}) for name, each in wanted.items() if isinstance(each, list)]
        del new["dependentRequired"]
    if isinstance(schemas := new.get("dependentSchemas"), dict):
        rules += [(name, {"allOf": [{"required": [name]}, each]}) for name, each in schemas.items()]
        del new["dependentSchemas"]
    if rules:
        add_all_of(new, *({"anyOf": [{"properties": {name: False}}, rule]} for name, rule in rules))
    return new
