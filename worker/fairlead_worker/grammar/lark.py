"""Pieces of llguidance's Lark grammars."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from fairlead_worker.grammar.diagnosis import check_schema
from fairlead_worker.grammar.json_schema import prepare_schema
from fairlead_worker.grammar.schema_walk import SchemaError

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


def lower_schema(schema: Any, whitespace: str | None, field: str = "") -> str:
    """Return the grammar of a JSON schema in llguidance's form. Raise SchemaError with the field and the place in it."""
    return _compile(_prepare(schema, whitespace, field), whitespace)


def embed_schema(schema: Any, whitespace: str | None, field: str) -> str:
    """Return a JSON schema within a Lark grammar, with its whitespace options. Raise SchemaError with the field and the place in it."""
    return to_json({"x-guidance": _options(whitespace)} | _prepare(schema, whitespace, field))


def _prepare(schema: Any, whitespace: str | None, field: str) -> dict[str, Any]:
    try:
        prepared: dict[str, Any] = prepare_schema(schema)
        check_schema(prepared, schema, lambda part: _compile(part, whitespace))
    except SchemaError as error:
        error.field = field
        raise
    except RecursionError:
        raise SchemaError("", "schemas within schemas are too deep") from None
    return prepared


def _compile(schema: Any, whitespace: str | None) -> str:
    return LLMatcher.grammar_from_json_schema(to_json(schema), defaults=_options(whitespace))


def _options(whitespace: str | None) -> "JsonCompileOptions":
    if whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}


def quote(text: str, special: Callable[[str], int | None] = lambda text: None) -> str:
    token = special(text) if text else None
    return to_json(text) if token is None else f"<[{token}]>"


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
