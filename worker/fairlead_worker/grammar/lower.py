"""Convert a client's constraint to an llguidance grammar. It runs in the checker process, because the client decides how long it takes."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from fairlead_worker.grammar.constraint import Constraint, ReasoningMarkers

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = "( |\\n[ \\t]{0,32})?"
"""Whitespace in JSON: nothing, a blank, or a line break and its indentation. Without a limit, models may write blanks forever."""

_NAMES = r"<\|[^|<>]+\|>|\[/?[A-Z_]+\]|<[^<>|\n]{1,60}>"
"""The form of special token names."""
_NO_FORCING = '%llguidance {"no_forcing": true}'


def lower(constraint: Constraint, special: Callable[[str], int | None]) -> str:
    """Return the grammar for `Compiler.matcher`. `special`: returns the id of a special token. Raise ValueError with the reason."""
    grammar = _lower_by_kind(constraint, special)
    if constraint.kind in ("regex", "choice", "grammar") and _mentions_special_token(constraint.text, special):
        grammar = _disable_forcing(grammar)
    return grammar if constraint.reasoning is None else _add_reasoning(constraint.reasoning, grammar, special)


def _lower_by_kind(constraint: Constraint, special: Callable[[str], int | None]) -> str:
    match constraint.kind:
        case "json":
            return _lower_json_schema(msgspec.json.decode(constraint.text), constraint.whitespace)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "choice":
            return "start: " + " | ".join(_quote(choice) for choice in msgspec.json.decode(constraint.text, type=list[str]))
        case "grammar":
            return any_to_lark(constraint.text)
        case "structural_tag":
            return _lower_structural_tag(msgspec.json.decode(constraint.text), special, constraint.whitespace)
        case "calls":
            return _lower_calls(msgspec.json.decode(constraint.text), constraint.whitespace)


def _lower_json_schema(schema: Any, whitespace: str | None) -> str:
    if schema is False:
        raise ValueError("the schema false allows nothing")
    return LLMatcher.grammar_from_json_schema(_to_json({} if schema is True else schema), defaults=_options(whitespace))


def _lower_structural_tag(document: Any, special: Callable[[str], int | None], whitespace: str | None) -> str:
    """Return a grammar of free text in which each trigger begins a structure: begin, JSON of a schema, end (as in vLLM and SGLang)."""
    structures, triggers = document.get("structures"), document.get("triggers")
    if not structures or not triggers:
        raise ValueError("needs structures (each with begin, schema and end) and triggers; other forms are not supported")
    rules: list[str] = []
    for number, structure in enumerate(structures):
        begin, end, schema = structure.get("begin"), structure.get("end", ""), structure.get("schema", {})
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError(f"structures[{number}]: begin and end must be strings")
        trigger = next((each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None)
        if trigger is None:
            raise ValueError(f"structures[{number}]: its begin {begin[:40]!r} begins with none of the triggers")
        ended = " ".join(_split_markers(end, special)) or '""'
        body = f"{_quote(begin[len(trigger) :])} %json {_with_whitespace(schema, whitespace)} {ended}"
        token = special(trigger)
        if token is None:
            rules += [f"open_{number}[lazy]: TEXT {_quote(trigger)}", f"tag_{number}: open_{number} {body}"]
        else:
            rules.append(f"tag_{number}: TEXT <[{token}]> {body}")
    options = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join(["%llguidance {}", f"start: ({options})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _lower_calls(document: Any, whitespace: str | None) -> str:
    """Return the grammar of `[{"name": …, "parameters": {…}}, …]`. Each tool's schema stays a separate document, so that its references
    hold."""
    rules = []
    for number, tool in enumerate(document["tools"]):
        begin = f'{{"name": {_to_json(tool["name"])}, "parameters": '
        rules.append(f'call_{number}: {_to_json(begin)} %json {_with_whitespace(tool["schema"], whitespace)} "}}"')
    more = "" if document["one"] else ' (", " call)*'
    options = " | ".join(f"call_{number}" for number in range(len(rules)))
    return "\n".join(["%llguidance {}", f'start: "[" call{more} "]"', f"call: {options}", *rules])


def _add_reasoning(reasoning: ReasoningMarkers, grammar: str, special: Callable[[str], int | None]) -> str:
    """Put reasoning before `grammar`: any text up to its end marker."""
    first, *rest = _split_markers(reasoning.end, special)
    ended = " ".join([*rest, "BLANK"])
    over = f"free[lazy]: TEXT {first}\nreasoning: free {ended}" if first.startswith('"') else f"reasoning: TEXT {first} {ended}"
    begun = "" if reasoning.is_open else " ".join(_split_markers(reasoning.start, special))
    direct = "" if reasoning.is_open else f" | {' '.join(_split_markers(reasoning.answer, special))} @answer"
    header = _NO_FORCING if "no_forcing" in grammar else "%llguidance {}"
    outer = "\n".join([header, f"start: {begun} reasoning @answer{direct}", over, r"TEXT: /(.|\n)*/", r"BLANK: /[ \n]{0,4}/"])
    inner = msgspec.json.decode(grammar)["grammars"][0] if grammar.startswith('{"grammars"') else {"lark_grammar": grammar}
    return _to_json({"grammars": [{"lark_grammar": outer}, inner | {"name": "answer"}]})


def _mentions_special_token(text: str, special: Callable[[str], int | None]) -> bool:
    """Return True if a text contains a special token's name. The markers of calls often are special tokens."""
    return any(special(name) is not None for name in set(re.findall(_NAMES, text.replace("\\", ""))))


def _disable_forcing(grammar: str) -> str:
    """Disable forced tokens. Otherwise mandatory text is tokenized as a whole, with special tokens for their names, which the grammar
    refuses."""
    if grammar.startswith('{"grammars"'):
        document = msgspec.json.decode(grammar)
        document["grammars"][0]["lark_grammar"] = f"{_NO_FORCING}\n{document['grammars'][0]['lark_grammar']}"
        return _to_json(document)
    bare = grammar.removeprefix("%llguidance {}")
    return grammar if bare.startswith("%llguidance") else f"{_NO_FORCING}\n{bare}"


def _split_markers(text: str, special: Callable[[str], int | None]) -> list[str]:
    """Split a marker into its special tokens and the text between them."""
    parts = re.split(f"({_NAMES})", text)
    return [_quote(part, special) for part in parts if part]


def _with_whitespace(schema: Any, whitespace: str | None) -> str:
    """Add whitespace options to a schema, which needs its own within a Lark grammar."""
    return _to_json({"x-guidance": _options(whitespace)} | schema) if isinstance(schema, dict) else _to_json(schema)


def _options(whitespace: str | None) -> "JsonCompileOptions":
    if whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}


def _quote(text: str, special: Callable[[str], int | None] = lambda text: None) -> str:
    token = special(text) if text else None
    return _to_json(text) if token is None else f"<[{token}]>"


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
