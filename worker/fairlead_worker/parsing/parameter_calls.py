"""Tool calls whose arguments are written as plain text between tags: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import regex

from fairlead_worker.parsing.between_calls import BetweenCalls
from fairlead_worker.parsing.call_head import NAME, CallHead, HeadHandler
from fairlead_worker.parsing.json_calls import JSON_CALLS
from fairlead_worker.parsing.pattern import match
from fairlead_worker.parsing.pythonic import parse_literal
from fairlead_worker.parsing.stage import EventSink, Stage, count_overlap, find_marker, get_properties

_TEXT = frozenset({"string"})
_KINDS: dict[type, frozenset[str]] = {
    str: _TEXT,
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
"""JSON schema types of a Python value."""


@dataclass(frozen=True, slots=True)
class ParameterFormat:
    """The call format of one family."""

    markers: tuple[str, ...]
    head: str
    """Head of a call, from a marker to the parameters: `name`. The group `rest`, if present, is not part of the head."""
    parameter: str
    """Start of a parameter (`key`; `string` is "true" if the value is not JSON), or the `end` of the call."""
    value_end: str
    tail: str = ""
    """Markup after a call: `more` where another call begins, `close` after the last. Empty: calls end with `end`."""
    next_parameter: str = ""
    """The start of a parameter's tag. With a name of the tool's other parameters it ends a value that has no `value_end`."""
    closers: tuple[str, ...] = ()
    """Tags that end a call. They end such a value if the answer ends after them, or another call begins."""
    at_start: str = ""

    def stage(self, opening: str, next_stage: Stage) -> Stage:
        def start_call(found: Any, text: str, sink: EventSink) -> tuple[str, Stage]:
            sink.begin_call(found["name"])
            sink.markup = (self.next_parameter, self.value_end)
            rest = found.start("rest") if found.groupdict().get("rest") else found.end()
            return text[rest:], _Parameters(self, sink.tools.schemas[found["name"]], next_stage)

        heads: list[tuple[str, HeadHandler]] = [(self.head, start_call)]
        if (hermes := JSON_CALLS["hermes"]).markers[0] in self.markers:  # Qwen3-Coder and GLM also write JSON within their tags
            heads += hermes.heads(opening, next_stage)
        return CallHead(heads, opening, next_stage)

    def after_call(self, next_stage: Stage) -> Stage:
        """Return the stage after a call."""
        return BetweenCalls(self.tail, lambda: self.stage("", next_stage), next_stage)


PARAMETER_CALLS: dict[str, ParameterFormat] = {
    "qwen3_coder": ParameterFormat(
        ("<tool_call>", "<function="),
        rf"\s*(?:<tool_call>)?\s*(?:<function=)?(?P<quote>[\"']?){NAME}(?P=quote)>",
        r"\s*(?:</parameter>)?\s*(?:<parameter=(?P<key>[^>\n]{1,256})>|(?P<end></function>|(?=</tool_call>)))",
        "</parameter>",
        r"\s*(?:</function>)?\s*(?:(?P<close></tool_call>)|(?P<more><function=))",
        "<parameter=",
        ("</function>", "</tool_call>"),
    ),
    "glm45": ParameterFormat(
        ("<tool_call>",),
        rf"\s*(?:<tool_call>)?\s*{NAME}\s*(?P<rest><)",
        r"\s*(?:</arg_value>)?\s*(?:<arg_key>(?P<key>[^<>]{1,256})(?:</arg_key>)?\s*<arg_value>|(?P<end></tool_call>))",
        "</arg_value>",
        "",
        "<arg_key>",
        ("</tool_call>",),
    ),
    "minimax_m2": ParameterFormat(
        ("<minimax:tool_call>", '<invoke name="'),
        rf'\s*(?:<minimax:tool_call>)?\s*(?:<invoke name=")?{NAME}">',
        r'\s*(?:</parameter>)?\s*(?:<parameter name="(?P<key>[^">]{1,256})">|(?P<end></invoke>|(?=</minimax:tool_call>)))',
        "</parameter>",
        r"\s*(?:</invoke>)?\s*(?:(?P<close></minimax:tool_call>)|(?P<more><invoke ))",
        '<parameter name="',
        ("</invoke>", "</minimax:tool_call>"),
    ),
    "deepseek_v32": ParameterFormat(
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="'),
        rf'\s*(?:<｜DSML｜(?:function|tool)_calls>)?\s*(?:<｜DSML｜invoke name=")?{NAME}">',
        r'\s*(?:</｜DSML｜parameter>)?\s*(?:<｜DSML｜parameter name="(?P<key>[^">]{1,256})"(?: string="(?P<string>[Tt]rue|[Ff]alse)")?>'
        r"|(?P<end></｜DSML｜invoke>|(?=</｜DSML｜(?:function|tool)_calls>)))",
        "</｜DSML｜parameter>",
        r"\s*(?:</｜DSML｜invoke>)?\s*(?:(?P<close></｜DSML｜(?:function|tool)_calls>)|(?P<more><｜DSML｜invoke ))",
        '<｜DSML｜parameter name="',
        ("</｜DSML｜invoke>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    ),
}
"""Models leave out the tags around a call, or the end of a value or a call, or double them. So the first tag of a call is a marker too."""


@dataclass(slots=True)
class _Parameters(Stage):
    """The stage between the parameters of a call."""

    format: ParameterFormat
    schema: Any
    next_stage: Stage
    separator: str = "{"
    """JSON text before the next parameter."""
    given: set[str] = field(default_factory=set)
    """Names of the parameters so far, which no further tag can begin."""
    is_doubtful: bool = False
    """A parameter came again: its first tag may have been text."""

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        found = match(self.format.parameter, text, partial=True)
        if found is None:
            return text, self.next_stage
        if found.partial:
            return ("" if final else text), self
        groups = found.groupdict()
        if groups["key"] is None:
            sink.add_arguments("{}" if self.separator == "{" else "}")
            if not self.is_doubtful:
                sink.end_call()
            return text[found.end() :], self.format.after_call(self.next_stage)
        key = _clean(groups["key"])
        self.is_doubtful |= key in self.given
        self.given.add(key)
        is_string = groups.get("string")
        kinds = (_TEXT if is_string.lower() == "true" else frozenset()) if is_string else find_kinds(self.schema, key)
        sink.add_arguments(f"{self.separator}{_to_json(key)}: ")
        self.separator = ", "
        opening = found[0][found[0].rindex("<") :]
        return text[found.end() :], _Doubled(opening, _Text(self) if kinds == _TEXT else _Value(self, kinds))

    def find_end(self, text: str, start: int, final: bool, kinds: frozenset[str] = _TEXT) -> tuple[int, str | None]:
        """Return (end of a parameter's value, the text after it), or (end of what certainly belongs to the value, None)."""
        format = self.format
        tags = tuple(filter(None, (format.value_end, format.next_parameter, *format.closers)))
        while True:
            found, tag = find_marker(text[start:], tags)
            if not tag:
                return (len(text), None) if final else (_before_breaks(text, len(text) - count_overlap(text, tags)), None)
            at = start + found
            if tag == format.value_end:
                return at, text[at + len(tag) :]
            ends = self._ends_at(text[at:], tag, final, kinds)
            if ends is None:
                return _before_breaks(text, at), None
            if ends:
                return _before_breaks(text, at), text[at:]
            start = at + 1

    def is_torn(self, value: str) -> bool:
        """Return whether a value without its own end has markup, or ends with a piece of its end tag: its real end is unknown."""
        format = self.format
        value, end = value.rstrip(), format.value_end
        if any(tag in value for tag in (format.next_parameter, *format.closers, *format.markers)):
            return True
        cut_start = value.endswith(tuple(end[at:] for at in range(1, len(end) - 1))) or (
            value.endswith(">") and value.count(">") > value.count("<")
        )
        return cut_start or value.endswith(tuple(end[:at] for at in range(1, len(end))))

    def _ends_at(self, text: str, tag: str, final: bool, kinds: frozenset[str]) -> bool | None:
        """Return whether a value without its own end ends at the tag. None: the text that follows decides."""
        if tag == self.format.next_parameter:
            # The rest of the tag may be torn: then the call ends here, unfinished, and its markup is no value.
            found = match(rf'{regex.escape(tag)}"?(?P<key>[^"<>\n]{{1,256}})["<>\n]', text, partial=not final)
            if found is None or found.partial:
                return None if found else False
            may_be_text = not kinds or "string" in kinds
            return not may_be_text or _clean(found["key"]) in get_properties(self.schema).keys() - self.given
        closers, markers = ("|".join(map(regex.escape, tags)) for tags in (self.format.closers, self.format.markers))
        found = match(rf"(?:(?:{closers})\s*){{1,4}}(?:{markers}{'|$' if final else ''})", text, partial=not final)
        return None if found and found.partial else found is not None


@dataclass(slots=True)
class _Doubled(Stage):
    """The start of a value, where the tag before it may be repeated."""

    opening: str
    value: Stage

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        if text.startswith(self.opening):
            return text.removeprefix(self.opening), self
        return text, self if not final and self.opening.startswith(text) else self.value


@dataclass(slots=True)
class _Text(Stage):
    """A string parameter. It is passed on unchanged, except for the line breaks next to its tags."""

    parameters: _Parameters
    started: bool = False
    sent: list[str] = field(default_factory=list)

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        if not self.started:
            if not text or (text == "\n" and not final):
                return text, self
            self.started = True
            sink.add_arguments('"')
            text = text.removeprefix("\n")
        end, rest = self.parameters.find_end(text, 0, final)
        if rest is None:
            sink.add_arguments(_to_json(text[:end])[1:-1])
            self.sent.append(text[:end])
            return text[end:], self
        sink.is_certain &= _has_end(text, end, rest) or not self.parameters.is_torn("".join(self.sent) + text[:end])
        sink.add_arguments(_to_json(text[:end].removesuffix("\n"))[1:-1] + '"')
        return rest, self.parameters


@dataclass(slots=True)
class _Value(Stage):
    """A parameter of another type. It is converted once it is complete."""

    parameters: _Parameters
    kinds: frozenset[str]
    """JSON types that the value may have. Empty: any."""
    seen: int = 0

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        end, rest = self.parameters.find_end(text, self.seen, final, self.kinds)
        if rest is not None:
            value = _convert(text[:end], self.kinds)
            is_other = value.startswith('"') and bool(self.kinds) and "string" not in self.kinds
            is_torn = self.parameters.is_torn(text[:end])
            sink.is_certain &= not (is_other and is_torn) and (_has_end(text, end, rest) or not (is_other or is_torn))
            sink.add_arguments(value)
            return rest, self.parameters
        self.seen = end
        if final:
            sink.add_arguments(text)  # incomplete, but not dropped
            return "", self
        return text, self


def _has_end(text: str, end: int, rest: str) -> bool:
    """Return whether a value ends with its own tag, which is then neither value nor rest."""
    return bool(text[end : len(text) - len(rest)].strip())


def _before_breaks(text: str, end: int) -> int:
    """Return the end of a text without its last line breaks, which may belong to a tag."""
    return len(text[:end].rstrip("\n"))


def _clean(key: str) -> str:
    """Return a parameter's name without the quotes that some models write around it."""
    return key.strip().strip("\"'")


def find_kinds(schema: Any, key: str) -> frozenset[str]:
    """Return the JSON types that a parameter schema allows for `key`, or an empty set if it declares none."""
    declared = get_properties(schema).get(key)
    branches = next((declared[name] for name in ("anyOf", "oneOf") if declared.get(name)), None) if isinstance(declared, dict) else None
    each = [_declared_kinds(branch) for branch in (branches if isinstance(branches, list) else [declared])]
    return frozenset().union(*each) if all(each) else frozenset()


def _declared_kinds(schema: Any) -> frozenset[str]:
    declared_type = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(declared_type, str | list):
        return frozenset([declared_type] if isinstance(declared_type, str) else (kind for kind in declared_type if isinstance(kind, str)))
    values = schema.get("enum") if isinstance(schema, dict) else None
    return _TEXT if isinstance(values, list) and all(isinstance(value, str) for value in values) else frozenset()


_NESTED = frozenset({"array", "object"})


def _convert(text: str, kinds: frozenset[str]) -> str:
    """Return a value as JSON: unchanged if it is JSON of an allowed type, also as Python writes it, else as a string.

    An optional string (a schema of string or null) is a string even if it reads as a number.
    """
    bare = text.strip()
    bare = {"True": "true", "False": "false", "None": "null"}.get(bare, bare)
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        value = parse_literal(bare) if bare[:1] in ("[", "{") and (not kinds or kinds & _NESTED) else None
        if not isinstance(value, list | dict):
            return _string_to_json(text)
        bare = msgspec.json.encode(value).decode()
    return _string_to_json(text) if "string" in kinds and not kinds & _KINDS[type(value)] else bare


def _string_to_json(text: str) -> str:
    return _to_json(text.removeprefix("\n").removesuffix("\n"))


def _to_json(text: str) -> str:
    return msgspec.json.encode(text).decode()
