"""Lower structural tags: vLLM's older form with `structures`, and xgrammar's form with a nested `format`."""

from collections.abc import Callable, Sequence
from typing import Any

from fairlead_worker.grammar.lark import embed_schema, quote, split_markers
from fairlead_worker.grammar.strings import use_ascii_classes

Special = Callable[[str], int | None]
MAX_DEPTH = 32
"""Nested formats. Deeper ones would exceed Python's recursion limit in places that cannot report it."""
FORMATS = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags, tags_with_separator"
TEXT = r"TEXT: /(.|\n)*/"


def lower_structural_tag(document: Any, special: Special, whitespace: str | None, fields: Sequence[str] = ()) -> str:
    """Return the grammar of a structural tag. Raise ValueError with the reason. `fields`: of the structures' schemas, for errors."""
    if document.get("format") is None:
        return _lower_structures(document, special, whitespace, fields)
    builder = FormatBuilder(special, whitespace)
    start = builder.build(document["format"], "format")
    return "\n".join(["%llguidance {}", f"start: {start}", *builder.rules, TEXT])


def _lower_structures(document: Any, special: Special, whitespace: str | None, fields: Sequence[str]) -> str:
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
        ended = " ".join(split_markers(end, special)) or '""'
        field = fields[number] if fields else f"structures[{number}].schema"
        body = f"{quote(begin[len(trigger) :])} %json {embed_schema(schema, whitespace, field)} {ended}"
        token = special(trigger)
        if token is None:
            rules += [f"open_{number}[lazy]: TEXT {quote(trigger)}", f"tag_{number}: open_{number} {body}"]
        else:
            rules.append(f"tag_{number}: TEXT <[{token}]> {body}")
    options = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join(["%llguidance {}", f"start: ({options})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])


class FormatBuilder:
    """Builds one rule for each nested format."""

    def __init__(self, special: Special, whitespace: str | None) -> None:
        """`special`: returns the id of a special token."""
        self.rules: list[str] = []
        self._special, self._whitespace = special, whitespace

    def build(self, given: Any, where: str, depth: int = 0) -> str:
        """Return the expression of a format, and add the rules that it needs. `where`: its path, for errors."""
        if not isinstance(given, dict):
            raise ValueError(f"{where}: must be an object with a type")
        if depth > MAX_DEPTH:
            raise ValueError(f"{where}: formats are nested more than {MAX_DEPTH} deep")
        match given.get("type"):
            case "const_string":
                return self._literal(_text(given, "value", where))
            case "json_schema":
                return self._rule(f"%json {embed_schema(_schema(given, where), self._whitespace, f'{where}.json_schema')}")
            case "regex":
                pattern = use_ascii_classes(_text(given, "pattern", where)).replace("\n", r"\n")
                return self._rule(f"/{_escape_slashes(pattern)}/")
            case "any_text":
                return self._rule("TEXT")
            case "sequence":
                return self._sequence(_elements(given, "elements", where), where, depth)
            case "or":
                parts = [self.build(each, at, depth + 1) for at, each in _elements(given, "elements", where)]
                return self._rule(" | ".join(parts))
            case "tag":
                return self._tag(given, where, depth)
            case "triggered_tags":
                return self._triggered(given, where, depth)
            case "tags_with_separator":
                return self._separated(given, where, depth)
            case kind:
                raise ValueError(f"{where}.type: {kind!r:.60} is not supported; supported are {FORMATS}")

    def _sequence(self, elements: Sequence[tuple[str, Any]], where: str, depth: int) -> str:
        for at, each in elements[:-1]:
            if isinstance(each, dict) and each.get("type") == "any_text":
                raise ValueError(f"{at}: any_text ends a sequence, because it has no end of its own; put it into a tag")
        return self._rule(" ".join(self.build(each, at, depth + 1) for at, each in elements))

    def _tag(self, given: dict[str, Any], where: str, depth: int, begin: str | None = None) -> str:
        """Return the rule of a tag. `begin`: the rest of its begin text if a trigger was already matched; None: all of it."""
        opening = self._literal(_text(given, "begin", where) if begin is None else begin)
        content, ends = given.get("content"), given.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise ValueError(f"{where}.end: must be a string, or a list of strings")
        if isinstance(content, dict) and content.get("type") == "any_text":
            return self._rule(f"{opening} {self._text_until(ends)}")
        closing = self._rule(" | ".join(map(self._literal, ends)))
        return self._rule(f"{opening} {self.build(content, f'{where}.content', depth + 1)} {closing}")

    def _text_until(self, ends: Sequence[str]) -> str:
        """Return text up to the first of `ends`. A special token cannot be part of text; other ends need the shortest match."""
        parts = []
        for end in ends:
            first, *rest = split_markers(end, self._special) or ['""']
            if first == '""':
                parts.append("TEXT")
            else:
                text = self._rule(f"TEXT {first}", lazy=first.startswith('"'))
                parts.append(" ".join([text, *rest]))
        return self._rule(" | ".join(parts))

    def _triggered(self, given: dict[str, Any], where: str, depth: int) -> str:
        triggers = given.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(each, str) and each for each in triggers):
            raise ValueError(f"{where}.triggers: must be a list of strings that are not empty")
        options = []
        for at, tag in _elements(given, "tags", where):
            begin = _text(tag, "begin", at) if isinstance(tag, dict) else ""
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise ValueError(f"{at}.begin: {begin[:40]!r} begins with none of the triggers")
            rest = self._tag(tag, at, depth + 1, begin[len(trigger) :])
            token = self._special(trigger)
            opening = f"TEXT <[{token}]>" if token is not None else self._rule(f"TEXT {quote(trigger)}", lazy=True)
            options.append(f"{opening} {rest}")
        tag = self._rule(" | ".join(options))
        least, only_first = bool(given.get("at_least_one")), bool(given.get("stop_after_first"))
        if only_first:
            return tag if least else self._rule(f"{tag} | TEXT")
        return self._rule(f"{tag}{'+' if least else '*'} TEXT")

    def _separated(self, given: dict[str, Any], where: str, depth: int) -> str:
        tags = [
            self._tag(tag, at, depth + 1) if isinstance(tag, dict) else self.build(tag, at) for at, tag in _elements(given, "tags", where)
        ]
        tag, separator = self._rule(" | ".join(tags)), self._literal(_text(given, "separator", where))
        several = tag if given.get("stop_after_first") else self._rule(f"{tag} ({separator} {tag})*")
        return several if given.get("at_least_one") else f"({several})?"

    def _rule(self, body: str, lazy: bool = False) -> str:
        name = f"format_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _literal(self, text: str) -> str:
        return " ".join(split_markers(text, self._special)) or '""'


def _text(given: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(given.get(name), str):
        raise ValueError(f"{where}.{name}: must be a string")
    text: str = given[name]
    return text


def _schema(given: dict[str, Any], where: str) -> Any:
    if not isinstance(given.get("json_schema"), dict | bool):
        raise ValueError(f"{where}.json_schema: must be a JSON schema, an object")
    return given["json_schema"]


def _elements(given: dict[str, Any], name: str, where: str) -> list[tuple[str, Any]]:
    if not isinstance(given.get(name), list) or not given[name]:
        raise ValueError(f"{where}.{name}: must be a list that is not empty")
    return [(f"{where}.{name}[{index}]", each) for index, each in enumerate(given[name])]


def _escape_slashes(pattern: str) -> str:
    """Escape slashes that are not escaped, for a regular expression between slashes."""
    out, escaped = [], False
    for character in pattern:
        out.append("\\/" if character == "/" and not escaped else character)
        escaped = character == "\\" and not escaped
    return "".join(out)
