"""Random JSON schemas: nested objects and arrays, enums, constants, patterns, bounds, formats, recursion, unicode.

A model that chooses tokens at random satisfies each of them within a few hundred tokens: lengths and depths are bounded, or random tokens
end them.
"""

import random
from collections.abc import Callable
from typing import Any

WORDS = ("red", "Größe", "naïve", "東京", "emoji 🙂", 'quo"te', "back\\slash", "тест", "two\nlines", "a/b", "", "ÿ")
PATTERNS = ("^[a-z]{2,6}$", "^[0-9]{3}-[0-9]{2}$", "^(yes|no|maybe)$", "^[A-ZÄÖÜ][a-zß]{1,5}$", "^#[0-9a-f]{6}$", "^x+y?$")
FORMATS = ("date", "time", "ipv4", "uuid")

Schema = dict[str, Any]


def schema(seed: int) -> Schema:
    """Return the schema of a seed. The same seed gives the same schema."""
    chance = random.Random(seed)
    if seed % 5 == 4:
        return _recursive(chance)
    return _object(chance, 3)


def _recursive(chance: random.Random) -> Schema:
    """Return the schema of a list or a tree that refers to itself."""
    value = _leaf(chance)
    link: Schema = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    if chance.random() < 0.4:
        link = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    node = {"type": "object", "properties": {"value": value, "next": link}, "required": ["value", "next"], "additionalProperties": False}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample([*WORDS[:4], "id", "name", "tags", "größe", "when"], chance.randint(1, 4))
    properties = {name: _any(chance, depth - 1) for name in names}
    required = names if chance.random() < 0.7 else chance.sample(names, chance.randint(0, len(names)))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any(chance: random.Random, depth: int) -> Schema:
    if depth <= 0:
        return _leaf(chance)
    makers: list[Callable[[], Schema]] = [
        lambda: _leaf(chance),
        lambda: _leaf(chance),
        lambda: _object(chance, depth),
        lambda: {"type": "array", "items": _any(chance, depth - 1), "minItems": chance.randint(0, 2), "maxItems": chance.randint(2, 3)},
        lambda: {"anyOf": [_leaf(chance), _object(chance, depth - 1)]},
    ]
    return chance.choice(makers)()


def _leaf(chance: random.Random) -> Schema:
    low = chance.randint(-50, 50)
    makers: list[Callable[[], Schema]] = [
        lambda: {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 1000)},
        lambda: {"type": "number", "exclusiveMinimum": low, "maximum": low + 5},
        lambda: {"type": "string", "minLength": chance.randint(0, 2), "maxLength": chance.randint(2, 8)},
        lambda: {"type": "string", "pattern": chance.choice(PATTERNS)},
        lambda: {"type": "string", "format": chance.choice(FORMATS)},
        lambda: {"enum": chance.sample([*WORDS, 1, 2.5, None, True, [1, "x"]], chance.randint(1, 4))},
        lambda: {"const": chance.choice(WORDS)},
        lambda: {"type": "boolean"},
        lambda: {"type": ["null", "boolean"]},
    ]
    return chance.choice(makers)()
