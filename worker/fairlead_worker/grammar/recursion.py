"""Find references that no finite document satisfies: `{"$ref": "#"}`, or an object that requires itself.

An answer that began such a branch would run to its token limit. The smallest fixed point of "has a finite document" decides, as for
unproductive nonterminals of a grammar.
"""

from collections import defaultdict
from typing import Any

from fairlead_worker.grammar.schema_walk import children, join, resolve


def find_endless(root: Any) -> frozenset[str]:
    """Return the references of a document whose target has no finite document. Others, of other documents too, are left out."""
    targets = {reference: target for reference in _references(root) if (target := resolve(root, reference)) is not None}
    users: dict[str, set[str]] = defaultdict(set)
    for reference, target in targets.items():
        for used in _references(target):
            users[used].add(reference)
    endless = changed = set(targets)
    while changed:
        ended = {reference for reference in changed if _ends(targets[reference], endless)}
        endless = endless - ended
        changed = {user for reference in ended for user in users[reference]} & endless
    return frozenset(endless)


def find_cycle(root: Any, endless: frozenset[str]) -> str | None:
    """Return the JSON pointer of a reference that makes every document endless, or None if there are finite ones."""
    node, pointer, seen = root, "", set[str]()
    while not _ends(node, endless):
        reference = str(node.get("$ref"))
        if reference in endless:
            if reference in seen:
                return join(pointer, "$ref")
            seen.add(reference)
            node, pointer = resolve(root, reference), reference[1:]
            continue
        keys, node = next(
            (keys, each) for keys, each in children(node) if keys[0] not in ("$defs", "definitions") and not _ends(each, endless)
        )
        pointer = join(pointer, *keys)
        if str(node.get("$ref")) in seen:
            return join(pointer, "$ref")
    return None


def _references(root: Any) -> set[str]:
    found, open_nodes = set(), [root]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, dict) and isinstance(node.get("$ref"), str):
            found.add(node["$ref"])
        open_nodes += [each for _, each in children(node)]
    return found


def _ends(node: Any, endless: "set[str] | frozenset[str]") -> bool:
    """Return True if a schema has a finite document where the references of `endless` have none."""
    if not isinstance(node, dict) or "const" in node or "enum" in node:
        return True
    reference = node.get("$ref")
    if isinstance(reference, str) and reference in endless:
        return False
    if not all(_ends(each, endless) for each in _list(node, "allOf")):
        return False
    if any(_list(node, key) and not any(_ends(each, endless) for each in node[key]) for key in ("anyOf", "oneOf")):
        return False
    given = node.get("type")
    types = {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)} if isinstance(given, list) else None
    if not types or types - {"object", "array"}:
        return True
    return ("object" in types and _object_ends(node, endless)) or ("array" in types and _array_ends(node, endless))


def _object_ends(node: dict[str, Any], endless: "set[str] | frozenset[str]") -> bool:
    properties = node["properties"] if isinstance(node.get("properties"), dict) else {}
    rest = "patternProperties" in node or node.get("additionalProperties", True)
    least = node.get("minProperties", 0)
    finite = sum(_ends(each, endless) for each in properties.values())
    has_finite_rest = finite == len(properties) if rest is False else _ends(rest, endless)
    if isinstance(least, int | float) and least > finite and not has_finite_rest:
        return False
    return all(_ends(properties.get(name, rest), endless) for name in _list(node, "required") if isinstance(name, str))


def _array_ends(node: dict[str, Any], endless: "set[str] | frozenset[str]") -> bool:
    least = node.get("minItems", 0)
    least = int(least) if isinstance(least, int | float) else 0
    first = _list(node, "prefixItems") or _list(node, "items")
    rest = node.get("additionalItems", True) if isinstance(node.get("items"), list) else node.get("items", True)
    return all(_ends(each, endless) for each in first[:least]) and (least <= len(first) or _ends(rest, endless))


def _list(node: dict[str, Any], key: str) -> list[Any]:
    return node[key] if isinstance(node.get(key), list) else []
