"""Pieces of llguidance's Lark grammars."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fairlead_worker.grammar.closed import close_objects

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = "( |\\n[ \\t]{0,32})?"
"""Whitespace in JSON: nothing, a blank, or a line break and its indentation. Without a limit, models may write blanks forever."""

NAMES = r"<\|[^|<>]+\|>|\[/?[A-Z_]+\]|<[^<>|\n]{1,60}>"
"""The form of special token names."""


def split_markers(text: str, special: Callable[[str], int | None]) -> list[str]:
    """Split a marker into its special tokens and the text between them."""
    parts = re.split(f"({NAMES})", text)
    return [quote(part, special) for part in parts if part]


def with_whitespace(schema: Any, whitespace: str | None) -> str:
    """Close the objects of a schema within a Lark grammar, and add its whitespace options."""
    return to_json({"x-guidance": options(whitespace)} | close_objects(schema)) if isinstance(schema, dict) else to_json(schema)


def options(whitespace: str | None) -> "JsonCompileOptions":
    if whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}


def quote(text: str, special: Callable[[str], int | None] = lambda text: None) -> str:
    token = special(text) if text else None
    return to_json(text) if token is None else f"<[{token}]>"


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
