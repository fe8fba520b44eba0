"""Convert a client's constraint to an llguidance grammar. It runs in the checker process, because the client decides how long it takes."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from fairlead_worker.grammar.constraint import Constraint, ReasoningMarkers
from fairlead_worker.grammar.lark import NAMES, embed_schema, lower_schema, quote, split_markers, to_json
from fairlead_worker.grammar.strings import use_ascii_classes
from fairlead_worker.grammar.structural_tag import lower_structural_tag

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
            return lower_schema(msgspec.json.decode(constraint.text), constraint.whitespace)
        case "regex":
            return LLMatcher.grammar_from_regex(use_ascii_classes(constraint.text))
        case "choice":
            return "start: " + " | ".join(quote(choice) for choice in msgspec.json.decode(constraint.text, type=list[str]))
        case "grammar":
            return any_to_lark(constraint.text)
        case "structural_tag":
            return lower_structural_tag(msgspec.json.decode(constraint.text), special, constraint.whitespace, constraint.fields)
        case "calls":
            return _lower_calls(msgspec.json.decode(constraint.text), constraint)


def _lower_calls(document: Any, constraint: Constraint) -> str:
    """Return the grammar of `[{"name": …, "parameters": {…}}, …]`. Each tool's schema stays a separate document, so that its references
    hold."""
    rules = []
    for number, (tool, field) in enumerate(zip(document["tools"], constraint.fields, strict=True)):
        begin = f'{{"name": {to_json(tool["name"])}, "parameters": '
        rules.append(f'call_{number}: {to_json(begin)} %json {embed_schema(tool["schema"], constraint.whitespace, field)} "}}"')
    more = "" if document["one"] else ' (", " call)*'
    options = " | ".join(f"call_{number}" for number in range(len(rules)))
    return "\n".join(["%llguidance {}", f'start: "[" call{more} "]"', f"call: {options}", *rules])


def _add_reasoning(reasoning: ReasoningMarkers, grammar: str, special: Callable[[str], int | None]) -> str:
    """Put reasoning before `grammar`: any text up to its end marker."""
    first, *rest = split_markers(reasoning.end, special)
    ended = " ".join([*rest, "BLANK"])
    over = f"free[lazy]: TEXT {first}\nreasoning: free {ended}" if first.startswith('"') else f"reasoning: TEXT {first} {ended}"
    begun = "" if reasoning.is_open else " ".join(split_markers(reasoning.start, special))
    direct = "" if reasoning.is_open else f" | {' '.join(split_markers(reasoning.answer, special))} @answer"
    header = _NO_FORCING if "no_forcing" in grammar else "%llguidance {}"
    outer = "\n".join([header, f"start: {begun} reasoning @answer{direct}", over, r"TEXT: /(.|\n)*/", r"BLANK: /[ \n]{0,4}/"])
    inner = msgspec.json.decode(grammar)["grammars"][0] if grammar.startswith('{"grammars"') else {"lark_grammar": grammar}
    return to_json({"grammars": [{"lark_grammar": outer}, inner | {"name": "answer"}]})


def _mentions_special_token(text: str, special: Callable[[str], int | None]) -> bool:
    """Return True if a text contains a special token's name. The markers of calls often are special tokens."""
    return any(special(name) is not None for name in set(re.findall(NAMES, text.replace("\\", ""))))


def _disable_forcing(grammar: str) -> str:
    """Disable forced tokens. Otherwise mandatory text is tokenized as a whole, with special tokens for their names, which the grammar
    refuses."""
    if grammar.startswith('{"grammars"'):
        document = msgspec.json.decode(grammar)
        document["grammars"][0]["lark_grammar"] = f"{_NO_FORCING}\n{document['grammars'][0]['lark_grammar']}"
        return to_json(document)
    bare = grammar.removeprefix("%llguidance {}")
    return grammar if bare.startswith("%llguidance") else f"{_NO_FORCING}\n{bare}"
