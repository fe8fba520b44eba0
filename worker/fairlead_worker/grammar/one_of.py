"""Decide whether the branches of a `oneOf` exclude each other. Then `anyOf`, which a grammar can enforce, means the same."""

import json
from itertools import combinations
from typing import Any

from fairlead_worker.grammar.schema_walk import Node, SchemaError, join, parts

_ALL = frozenset({"null", "boolean", "string", "array", "object", "integer", "fraction"})
MAX_DEPTH = 8
"""Nested properties and branches that are compared."""
MAX_COMPARED = 20_000
"""Pairs of schemas that are compared in one document. A pair takes 10 to 20 µs, nested unions multiply."""


class Branches:
    """Compares the branches of every `oneOf` in a document."""

    def __init__(self, root: Any) -> None:
        self.required: dict[int, set[str]] = {}
        """Discriminators by the identity of the branch that must have them."""
        self.tags: dict[int, Node] = {}
        """What a discriminator's `mapping` says of a branch, by the branch's identity."""
        self._root = root
        self._compared = 0

    def require_discriminator(self, node: Node) -> None:
        """Make the discriminator of a `oneOf` a required property of its branches.

        The property is often optional in the schema, because its only value is the default (pydantic). Without it a reader cannot tell
        the branches apart, and pydantic refuses the document.
        """
        described = node.get("discriminator")
        if not isinstance(described, dict) or not isinstance(name := described.get("propertyName"), str):
            return
        if isinstance(mapping := described.get("mapping"), dict):
            self._read_mapping(node["oneOf"], name, mapping)
        seen: set[int] = set()
        open_nodes = list(node["oneOf"])
        while open_nodes:
            for part in self._parts(open_nodes.pop()):
                if id(part) in seen:
                    continue
                seen.add(id(part))
                open_nodes += [each for key in ("oneOf", "anyOf") if isinstance(part.get(key), list) for each in part[key]]
                if isinstance(part.get("properties"), dict) and name in part["properties"]:
                    self.required.setdefault(id(part), set()).add(name)

    def _read_mapping(self, branches: list[Any], name: str, mapping: dict[str, Any]) -> None:
        """Tag the branches whose discriminator has no constant of its own, as OpenAPI says."""
        for branch in branches:
            reference = branch.get("$ref") if isinstance(branch, dict) else None
            if not isinstance(reference, str) or not (given := _property(parts(self._root, branch), name)):
                continue
            tags = [tag for tag, target in mapping.items() if target in (reference, reference.rpartition("/")[2])]
            if tags and _values(parts(self._root, *given)) is None:
                self.tags[id(branch)] = {"type": "object", "properties": {name: {"enum": tags}}, "required": [name]}

    def _parts(self, *nodes: Any) -> list[Node]:
        found = parts(self._root, *nodes)
        return [*found, *(self.tags[id(each)] for each in found if id(each) in self.tags)]

    def check_disjoint(self, branches: list[Any], pointer: str) -> None:
        """Raise SchemaError if two branches of the `oneOf` at `pointer` may both hold for a value."""
        tagged = self._find_tagged(branches)
        for (first, one), (second, other) in combinations(enumerate(branches), 2):
            if not (first in tagged and second in tagged) and not self._disjoint([one], [other], MAX_DEPTH):
                raise SchemaError(
                    join(pointer, "oneOf"),
                    f"branches {first} and {second} may both hold for a value, and no grammar can exclude that: use anyOf, "
                    "or require in each branch a property whose const differs",
                )

    def _find_tagged(self, branches: list[Any]) -> set[int]:
        """Return the objects among the branches, if the constants of one required property tell them apart. The work is linear."""
        objects = {at: found for at, branch in enumerate(branches) if _types(found := self._parts(branch)) == {"object"}}
        for name in set.intersection(*map(self._required, objects.values())) if objects else ():
            values = [_values(self._parts(*_property(nodes, name))) for nodes in objects.values()]
            listed = [each for each in values if each is not None]
            if len(listed) == len(values) and sum(map(len, listed)) == len(frozenset().union(*listed)):
                return set(objects)
        return set()

    def _disjoint(self, one: list[Any], other: list[Any], depth: int) -> bool:
        """Return True if no value satisfies all schemas of both lists. False if that is not sure."""
        self._compared += 1
        if False in one or False in other:
            return True
        if depth == 0 or self._compared > MAX_COMPARED:
            return False
        left, right = self._parts(*one), self._parts(*other)
        for branched, rest in ((left, right), (right, left)):
            for node in branched:
                for key in ("anyOf", "oneOf"):
                    branches = node.get(key)
                    if isinstance(branches, list) and all(self._disjoint([branch], list(rest), depth - 1) for branch in branches):
                        return True
        types = _types(left) & _types(right)
        if not types:
            return True
        values, others = _values(left), _values(right)
        if values is not None and others is not None:
            return not values & others
        return types == {"object"} and self._objects_disjoint(left, right, depth)

    def _objects_disjoint(self, left: list[Node], right: list[Node], depth: int) -> bool:
        required, others = self._required(left), self._required(right)
        if any(_forbids(right, name) for name in required) or any(_forbids(left, name) for name in others):
            return True
        return any(self._disjoint(_property(left, name), _property(right, name), depth - 1) for name in sorted(required & others))

    def _required(self, nodes: list[Node]) -> set[str]:
        names = {name for node in nodes if isinstance(node.get("required"), list) for name in node["required"] if isinstance(name, str)}
        return names.union(*(self.required.get(id(node), ()) for node in nodes))


def _types(nodes: list[Node]) -> frozenset[str]:
    """Return the JSON types that all of `nodes` allow. A number is an `integer` or a `fraction`."""
    types = _ALL
    for node in nodes:
        given = node.get("type")
        if isinstance(given, str | list):
            named = {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)}
            types &= frozenset(named | ({"integer", "fraction"} if "number" in named else set()))
    if (values := _values(nodes)) is not None:
        types &= frozenset(kind for kind, _ in values)
    return types


def _values(nodes: list[Node]) -> frozenset[tuple[str, str]] | None:
    """Return (type, JSON) of each value that `const` and `enum` allow, or None without them."""
    found: frozenset[tuple[str, str]] | None = None
    for node in nodes:
        listed = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(listed, list):
            values = frozenset(map(_value, listed))
            found = values if found is None else found & values
    return found


def _value(value: Any) -> tuple[str, str]:
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean", str(value))
    if isinstance(value, int | float):
        whole = value == int(value) if isinstance(value, int) or abs(value) < 1e300 else False
        return ("integer", str(int(value))) if whole else ("fraction", repr(value))
    kind = "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    return (kind, json.dumps(value, sort_keys=True))


def _property(nodes: list[Node], name: str) -> list[Any]:
    return [each["properties"][name] for each in nodes if isinstance(each.get("properties"), dict) and name in each["properties"]]


def _forbids(nodes: list[Node], name: str) -> bool:
    """Return True if an object that follows `nodes` cannot have a property `name`."""
    return any(
        node.get("additionalProperties") is False and "patternProperties" not in node and name not in (node.get("properties") or {})
        for node in nodes
    )
