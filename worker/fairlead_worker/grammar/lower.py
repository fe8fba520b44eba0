"""From what a client wrote to a grammar of llguidance. Runs in the checker's process: how long it takes is the client's choice."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from fairlead_worker.grammar.constraint import Constraint, Thought

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = "( |\\n[ \\t]{0,32})?"
"""Between the parts of JSON: nothing, a blank, or a new line and its indentation. Without a bound, models may write blanks for ever."""


def lower(constraint: Constraint, special: Callable[[str], int | None]) -> str:
    """The grammar, for `Compiler.matcher`. `special`: the id of a special token. Raises ValueError with the reason."""
    grammar = _lowered(constraint, special)
    return grammar if constraint.thought is None else _after(constraint.thought, grammar, special)


def _lowered(constraint: Constraint, special: Callable[[str], int | None]) -> str:
    match constraint.kind:
        case "json":
            return _json(msgspec.json.decode(constraint.text), constraint.whitespace)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "choice":
            return "start: " + " | ".join(_literal(choice) for choice in msgspec.json.decode(constraint.text, type=list[str]))
        case "grammar":
            return any_to_lark(constraint.text)
        case "structural_tag":
            return _structural_tag(msgspec.json.decode(constraint.text), special, constraint.whitespace)
        case "calls":
            return _calls(msgspec.json.decode(constraint.text), constraint.whitespace)


def _json(schema: Any, whitespace: str | None) -> str:
    if schema is False:
        raise ValueError("the schema false allows nothing")
    return LLMatcher.grammar_from_json_schema(_written({} if schema is True else schema), defaults=_options(whitespace))


def _structural_tag(document: Any, special: Callable[[str], int | None], whitespace: str | None) -> str:
    """Free text, in which each trigger begins one of its structures: begin, JSON of a schema, end (the form of vLLM and SGLang)."""
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
        ended = " ".join(_pieces(end, special)) or '""'
        body = f"{_literal(begin[len(trigger) :])} %json {_spaced(schema, whitespace)} {ended}"
        token = special(trigger)
        if token is None:
            rules += [f"open_{number}[lazy]: TEXT {_literal(trigger)}", f"tag_{number}: open_{number} {body}"]
        else:
            rules.append(f"tag_{number}: TEXT <[{token}]> {body}")
    options = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join(["%llguidance {}", f"start: ({options})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _calls(document: Any, whitespace: str | None) -> str:
    """`[{"name": …, "parameters": {…}}, …]`: each tool's schema is a document of its own, so that its references hold."""
    rules = []
    for number, tool in enumerate(document["tools"]):
        begin = f'{{"name": {_written(tool["name"])}, "parameters": '
        rules.append(f'call_{number}: {_written(begin)} %json {_spaced(tool["schema"], whitespace)} "}}"')
    more = "" if document["one"] else ' (", " call)*'
    options = " | ".join(f"call_{number}" for number in range(len(rules)))
    return "\n".join(["%llguidance {}", f'start: "[" call{more} "]"', f"call: {options}", *rules])


def _after(thought: Thought, grammar: str, special: Callable[[str], int | None]) -> str:
    """`grammar` behind reasoning, which is any text up to its end marker."""
    first, *rest = _pieces(thought.end, special)
    ended = " ".join([*rest, "BLANK"])
    over = f"free[lazy]: TEXT {first}\nthought: free {ended}" if first.startswith('"') else f"thought: TEXT {first} {ended}"
    begun = "" if thought.opened else " ".join(_pieces(thought.start, special))
    direct = "" if thought.opened else f" | {' '.join(_pieces(thought.answer, special))} @answer"
    outer = "\n".join(["%llguidance {}", f"start: {begun} thought @answer{direct}", over, r"TEXT: /(.|\n)*/", r"BLANK: /[ \n]{0,4}/"])
    inner = msgspec.json.decode(grammar)["grammars"][0] if grammar.startswith('{"grammars"') else {"lark_grammar": grammar}
    return _written({"grammars": [{"lark_grammar": outer}, inner | {"name": "answer"}]})


def _pieces(text: str, special: Callable[[str], int | None]) -> list[str]:
    """A marker as the special tokens that it has, and the text between them."""
    parts = re.split(r"(<\|[^|<>]+\|>|\[/?[A-Z_]+\]|<[^<>|]+>)", text)
    return [_literal(part, special) for part in parts if part]


def _spaced(schema: Any, whitespace: str | None) -> str:
    """A schema within a Lark grammar brings its options along."""
    return _written({"x-guidance": _options(whitespace)} | schema) if isinstance(schema, dict) else _written(schema)


def _options(whitespace: str | None) -> "JsonCompileOptions":
    if whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}


def _literal(text: str, special: Callable[[str], int | None] = lambda text: None) -> str:
    token = special(text) if text else None
    return _written(text) if token is None else f"<[{token}]>"


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
