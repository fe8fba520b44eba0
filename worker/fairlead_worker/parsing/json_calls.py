"""Tool calls with JSON arguments, in the formats of most families.

A format is data: markers that begin calls, the head of a call up to the opening brace of its arguments, and the markup between and after
calls. Patterns are tried on growing text: a *partial* match (of the `regex` library) waits for more text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec

from fairlead_worker.parsing.between_calls import BetweenCalls
from fairlead_worker.parsing.call_head import NAME, CallHead, HeadHandler
from fairlead_worker.parsing.pattern import match
from fairlead_worker.parsing.pythonic import parse_literal
from fairlead_worker.parsing.scanner import PYTHON_OUTSIDE, Scanner, escape_controls
from fairlead_worker.parsing.stage import EventSink, PlainText, Stage, count_overlap, find_marker, get_properties

_HEAD = rf'(?P<object>\{{)\s*"name"\s*:\s*"{NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<open>null|\{{\s*\}}|\{{(?=\s*[^\s}}]))'
_LIST_HEAD, _LIST_ANY = rf"\s*(?:\[\s*)?{_HEAD}", r"\s*(?:\[\s*)?(?P<open>\{)"
_PYTHON = r"True|False|None|'(?:[^'\\\n]|\\.)*+'"
"""Python's words and strings, which some models write within JSON."""
_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys that models write for the arguments. In an object without a marker, only the first two tell a call from data."""
_TYPES = ("function", "function_call", "tool_call", "tool_use")


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The call format of one family."""

    markers: tuple[str, ...]
    """Each of them begins calls, anywhere in an answer."""
    head: str
    """Head of each call, after a marker or another call. Groups: `name`, `open` (the brace of the arguments; else there are none), `object`
    (the brace of an object that holds both; without it, nothing surrounds the arguments), and `id` (what the call's id is made of)."""
    tail: str = ""
    """Markup between and after calls, as in `BetweenCalls`."""
    any_object: str = ""
    """Start (`open`) of an object whose keys have another order than in `head`. Empty: not supported."""
    at_start: str = ""
    """An answer that begins with one of these characters begins with calls."""
    only_head_at_start: bool = False
    """True if a call without a marker must have its keys in the order of `head`, so that any other object is text at once."""
    forced: bool = False
    """True if a grammar makes the whole answer."""

    def stage(self, opening: str, next_stage: Stage) -> Stage:
        """Return the stage after a marker, or at the start of an answer."""
        return CallHead(self.heads(opening, next_stage), opening, next_stage, self.forced)

    def heads(self, opening: str, next_stage: Stage) -> list[tuple[str, HeadHandler]]:
        """Return the patterns of a call's head, and what to do at each."""

        def start_call(found: Any, text: str, sink: EventSink) -> tuple[str, Stage]:
            scanner, at = Scanner(), found.start("open")
            groups = found.groupdict()
            if groups.get("object") and found["open"] != "{":  # other keys may hold the arguments
                return hold_object(text, found.start("object"))
            sink.begin_call(found["name"], groups.get("id") or "")
            if groups.get("object"):
                scanner.scan(text[found.start("object") : at])
            if found["open"] != "{":
                sink.add_arguments("{}")
                sink.end_call()
                return text[found.end() :], self.after_call(next_stage)
            return text[at:], _Arguments(self, scanner, scanner.depth, next_stage)

        def start_object(found: Any, text: str, sink: EventSink) -> tuple[str, Stage]:
            return hold_object(text, found.start("open"))

        def hold_object(text: str, at: int) -> tuple[str, Stage]:
            is_bare = bool(self.at_start) and not opening
            return text[at:], _AnyObject(self, opening + text[:at], next_stage, Scanner("\"'", PYTHON_OUTSIDE), is_bare)

        patterns: list[tuple[str, HeadHandler]] = [(self.head, start_call)]
        if self.any_object and (opening or not self.only_head_at_start):
            patterns.append((self.any_object, start_object))
        return patterns

    def after_call(self, next_stage: Stage) -> Stage:
        """Return the stage after a call."""
        return BetweenCalls(self.tail, lambda: self.stage("", next_stage), next_stage)


JSON_CALLS: dict[str, JsonFormat] = {
    "hermes": JsonFormat(
        ("<tool_call>",),
        rf"\s*(?:<tool_call>)?\s*(?:```(?:json)?)?{_LIST_HEAD}",
        r"\s*\}?\s*\]?\s*(?:```)?\s*(?:(?P<close></tool_call>)|,?\s*(?P<more>\{))",
        _LIST_ANY,
        "{",
        only_head_at_start=True,
    ),
    "llama3_json": JsonFormat(
        ("<|python_tag|>", "<|python_start|>"),
        _LIST_HEAD,
        r"\s*(?:[;,]?\s*(?P<more>\{)|(?P<part>\])|(?P<close><\|python_end\|>))",
        _LIST_ANY,
        "{[",
    ),
    "mistral": JsonFormat(
        ("[TOOL_CALLS]",),
        rf"{_LIST_HEAD}|\s*{NAME}(?:\[CALL_ID\](?P<id>\w{{1,64}}))?(?:\[ARGS\])?\s*(?P<open>\{{|null)",
        r"\s*(?:,\s*(?P<more>\{)|(?P<close>\]))",
        _LIST_ANY,
    ),
    "deepseek_v3": JsonFormat(
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        r"\s*(?:<｜tool▁calls▁begin｜>)?\s*(?:<｜tool▁call▁begin｜>){0,2}"
        rf"(?:function<｜tool▁sep｜>{NAME}|{NAME}<｜tool▁sep｜>)\s*(?:```json)?\s*(?P<open>\{{|null)",
        r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*(?:(?P<more><｜tool▁call▁begin｜>)|(?P<close><｜tool▁calls▁end｜>))",
    ),
    "kimi_k2": JsonFormat(
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        r"\s*(?:<\|tool_calls_section_begin\|>)?\s*(?:<\|tool_call_begin\|>){0,2}\s*(?:functions\.)?(?P<name>[^\s:<>|]{1,256})(?::(?P<id>\d{1,6}))?"
        r"\s*(?:<\|tool_call_argument_begin\|>){1,2}\s*(?P<open>\{|null|(?=<\|tool_call_end\|>))",
        r"\s*(?:<\|tool_call_end\|>)?\s*(?:(?P<more><\|tool_call_begin\|>)|(?P<close><\|tool_calls_section_end\|>))",
    ),
    "granite": JsonFormat(
        ("<|tool_call|>", "<tool_call>"), _LIST_HEAD, r"\s*(?:,\s*(?P<more>\{)|(?P<close>\]|</tool_call>))", _LIST_ANY
    ),
    "phi4_mini": JsonFormat(
        ("<|tool_call|>", "functools["),
        _LIST_HEAD,
        r"\s*(?:,\s*(?P<more>\{)|(?P<part>\])|(?P<close><\|/tool_call\|>))",
        _LIST_ANY,
    ),
}  # fmt: skip
FORCED_CALLS = JsonFormat((), _LIST_HEAD, r"\s*(?:,\s*(?P<more>\{)|(?P<close>\]))", at_start="[{", forced=True)
"""The format of an answer that a grammar forces to be calls: `[{"name": …, "parameters": {…}}, …]`."""


@runtime_checkable
class Format(Protocol):
    """The interface of all call formats."""

    @property
    def markers(self) -> tuple[str, ...]: ...
    @property
    def at_start(self) -> str: ...
    def stage(self, opening: str, next_stage: Stage) -> Stage: ...


class TextWithCalls(Stage):
    """Text in which calls may begin."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._started = not format.at_start

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        if not self._started:
            stripped = text.lstrip()
            if not stripped and not final:
                return text, self
            self._started = True
            if stripped and stripped[0] in self._format.at_start:
                sink.add_text(text[: len(text) - len(stripped)])
                return stripped, self._format.stage("", self)
        at, marker = find_marker(text, self._format.markers)
        if marker:
            sink.add_text(text[:at])
            return text[at + len(marker) :], self._format.stage(marker, self)
        keep = 0 if final else count_overlap(text, self._format.markers)
        sink.add_text(text[: len(text) - keep])
        return text[len(text) - keep :], self


class NamedCall(Stage):
    """An answer that consists of one call's arguments, made by the grammar of a tool's schema."""

    def __init__(self, name: str) -> None:
        self._name = name

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        stripped = text.lstrip()
        if not stripped:
            return ("" if final else text), self
        sink.begin_call(self._name)
        return stripped, _Arguments(JsonFormat((), ""), Scanner(), 0, PlainText())


@dataclass(slots=True)
class _Arguments(Stage):
    """The object of a call's arguments, which is passed on as it is if it is JSON."""

    format: JsonFormat
    scanner: Scanner
    depth: int
    """Depth of the brackets around the arguments."""
    next_stage: Stage

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        used, ended = self.scanner.scan(text, self.depth)
        sink.add_arguments(self.scanner.escape_controls(text[:used]))
        if not ended and used < len(text):
            python = match(_PYTHON, text[used:], partial=not final)
            if python is not None and python.partial:
                return text[used:], self
            value = parse_literal(python[0]) if python is not None else None
            if python is not None and (value is not None or python[0] == "None"):
                sink.add_arguments(msgspec.json.encode(value).decode())
                return text[used + python.end() :], self
        if ended:
            if self.depth:
                return text[used:], _Closing(self.format, self.scanner, self.next_stage)
            sink.end_call()
            return text[used:], self.format.after_call(self.next_stage)
        return text[used:], self if used == len(text) else self.next_stage


@dataclass(slots=True)
class _Closing(Stage):
    """The rest of an object after its arguments. Keys that no call has leave the call incomplete: they may be arguments too."""

    format: JsonFormat
    scanner: Scanner
    next_stage: Stage
    _parts: list[str] = field(default_factory=list)

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        used, ended = self.scanner.scan(text)
        self._parts.append(text[:used])
        if used == len(text) and not ended and not final:
            return "", self
        # Some models leave out the last brace.
        rest = _decode(f'{{"type":"function"{"".join(self._parts)}{"" if ended else "}"}')
        if isinstance(rest, dict) and rest.keys() <= {"id", "type"} and rest["type"] in _TYPES:
            sink.end_call()
        return text[used:], self.format.after_call(self.next_stage)


@dataclass(slots=True)
class _AnyObject(Stage):
    """An object that may be a call with other keys, or in another order. This is known once the object is complete."""

    format: JsonFormat
    raw: str
    """All text since the marker. It is plain text if the object is no call."""
    next_stage: Stage
    scanner: Scanner
    is_bare: bool
    """True if no marker says that this is a call."""
    _parts: list[str] = field(default_factory=list)

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        used, ended = self.scanner.scan(text)
        self._parts.append(text[:used])
        if not ended and used == len(text) and not final:
            return "", self
        written = "".join(self._parts)
        call = _parse_call(written if ended else written + "}", sink.tools.schemas, self.is_bare or not ended)
        if call is None:
            sink.add_text(self.raw + written)
            return text[used:], self.next_stage
        sink.begin_call(call[0])
        sink.add_arguments(call[1])
        sink.end_call()
        return text[used:], self.format.after_call(self.next_stage)


def _parse_call(written: str, schemas: Mapping[str, Any], is_strict: bool) -> tuple[str, str] | None:
    """Return (name, arguments) of an object, or None if it is no call of a known tool, or has a key that may be an argument.

    `is_strict`: it must have `arguments` or `parameters`.
    """
    value = _decode(written)
    if not isinstance(value, dict):
        return None
    if isinstance(inner := value.get("function"), dict):
        outer = {key: each for key, each in value.items() if key != "function"}
        value = outer | inner if not outer.keys() & inner.keys() else {}
    names = [value.pop(key) for key in _NAMES if key in value]
    found = [value.pop(key) for key in (_ARGUMENTS[:2] if is_strict else _ARGUMENTS) if key in value]
    if len(names) != 1 or not isinstance(names[0], str) or names[0] not in schemas or (is_strict and not found):
        return None
    given = [each for each in found if each not in (None, "", [], {})]
    arguments = given[0] if given else {}
    if isinstance(arguments, str):
        arguments = _decode(arguments)
    known = {"id", "type"} if arguments or "id" not in get_properties(schemas[names[0]]) else {"type"}
    if len(given) > 1 or not isinstance(arguments, dict) or value.keys() - known or value.get("type", "function") not in _TYPES:
        return None
    return names[0], msgspec.json.encode(arguments).decode()


def _decode(written: str) -> Any:
    """Return the value of a JSON text, or of one that Python writes, as some models do; None for anything else."""
    written = escape_controls(written)
    try:
        return msgspec.json.decode(written)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return parse_literal(written)
