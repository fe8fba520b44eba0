"""What every part of the JSON schema code shares: errors with a place in the user's schema, references, and the parts of a node."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Node = dict[str, Any]

DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are not schemas."""
NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
"""Keywords whose values have schemas by name: the names are not keywords."""


MAX_POINTER = 70
"""Characters. Error messages repeat at most 200 of the client's, see `common/truncate.py`."""


class SchemaError(ValueError):
    """A schema cannot be enforced. The message begins with the place as a JSON pointer (RFC 6901), of a deep one with its end."""

    def __init__(self, pointer: str, message: str) -> None:
        place = pointer if len(pointer) <= MAX_POINTER else f"…{pointer[-MAX_POINTER:]}"
        super().__init__(f"at {place or 'its root'}: {message}")
        self.field = ""
        """The schema's field, where a constraint has several schemas."""


def join(pointer: str, *keys: str | int) -> str:
    """Return the JSON pointer of a place below `pointer`."""
    return pointer + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def children(node: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield (keys from the node, schema) of each schema directly in a node. An unknown keyword may hold a schema that is referred to."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if key in DATA:
            continue
        if isinstance(value, list):
            yield from (((key, at), each) for at, each in enumerate(value) if isinstance(each, dict))
        elif isinstance(value, dict) and key in NAMED:
            yield from (((key, name), each) for name, each in value.items())
        elif isinstance(value, dict):
            yield (key,), value


def reference_keys(reference: str) -> list[str]:
    """Return the keys on the way from the root to what a reference within the document names."""
    return [unquote(key).replace("~1", "/").replace("~0", "~") for key in reference[1:].split("/")[1:]]


def add_all_of(node: Node, *schemas: Node) -> None:
    """Let `schemas` hold too. An `allOf` that is no list stays, and the compiler refuses it."""
    given = node.get("allOf", [])
    if isinstance(given, list):
        node["allOf"] = [*given, *schemas]


def resolve(root: Any, reference: Any) -> Any:
    """Return the schema that a reference within the document names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for key in reference_keys(reference):
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return found if reference == "#" or reference.startswith("#/") else None


def parts(root: Any, *nodes: Any) -> list[Node]:
    """Return the schemas that all hold where `nodes` hold: they, what they refer to, and their `allOf`."""
    found: dict[int, Node] = {}
    open_nodes = list(nodes)
    while open_nodes:
        node = open_nodes.pop()
        if not isinstance(node, dict) or id(node) in found:
            continue
        found[id(node)] = node
        if (target := resolve(root, node.get("$ref"))) is not None:
            open_nodes.append(target)
        if isinstance(node.get("allOf"), list):
            open_nodes += node["allOf"]
    return list(found.values())
