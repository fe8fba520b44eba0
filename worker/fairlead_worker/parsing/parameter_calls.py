"""Tool calls whose arguments are written as plain text between tags: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2."""

from dataclasses import dataclass
from typing import Any

import msgspec

from fairlead_worker.parsing.between_calls import BetweenCalls
from fairlead_worker.parsing.call_head import NAME, CallHead
from fairlead_worker.parsing.pattern import match
from fairlead_worker.parsing.stage import EventSink, Stage, count_overlap

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
    at_start: str = ""

    def stage(self, opening: str, next_stage: Stage) -> Stage:
        def start_call(found: Any, text: str, sink: EventSink) -> tuple[str, Stage]:
            sink.begin_call(found["name"])
            rest = found.start("rest") if found.groupdict().get("rest") else found.end()
            return text[rest:], _Parameters(self, sink.tools.schemas[found["name"]], next_stage)

        return CallHead([(self.head, start_call)], opening, next_stage)

    def after_call(self, next_stage: Stage) -> Stage:
        """Return the stage after a call."""
        return BetweenCalls(self.tail, lambda: self.stage("", next_stage), next_stage)


PARAMETER_CALLS: dict[str, ParameterFormat] = {
    "qwen3_coder": ParameterFormat(
        ("<tool_call>",),
        rf"\s*<function={NAME}>",
        r"\s*(?:<parameter=(?P<key>[^>\n]{1,256})>|(?P<end></function>))",
        "</parameter>",
        r"\s*(?:(?P<close></tool_call>)|(?P<more><function=))",
    ),
    "glm45": ParameterFormat(
        ("<tool_call>",),
        rf"\s*{NAME}\s*(?P<rest><)",
        r"\s*(?:<arg_key>(?P<key>[^<]{1,256})</arg_key>\s*<arg_value>|(?P<end></tool_call>))",
        "</arg_value>",
    ),
    "minimax_m2": ParameterFormat(
        ("<minimax:tool_call>",),
        rf'\s*<invoke name="{NAME}">',
        r'\s*(?:<parameter name="(?P<key>[^">]{1,256})">|(?P<end></invoke>))',
        "</parameter>",
        r"\s*(?:(?P<close></minimax:tool_call>)|(?P<more><invoke ))",
    ),
    "deepseek_v32": ParameterFormat(
        ("<｜DSML｜function_calls>",),
        rf'\s*<｜DSML｜invoke name="{NAME}">',
        r'\s*(?:<｜DSML｜parameter name="(?P<key>[^">]{1,256})" string="(?P<string>true|false)">|(?P<end></｜DSML｜invoke>))',
        "</｜DSML｜parameter>",
        r"\s*(?:(?P<close></｜DSML｜function_calls>)|(?P<more><｜DSML｜invoke ))",
    ),
}


@dataclass(slots=True)
class _Parameters:
    """The stage between the parameters of a call."""

    format: ParameterFormat
    schema: Any
    next_stage: Stage
    separator: str = "{"
    """JSON text before the next parameter."""
    is_reasoning = False

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        found = match(self.format.parameter, text, partial=True)
        if found is None:
            return text, self.next_stage
        if found.partial:
            return ("" if final else text), self
        groups = found.groupdict()
        if groups["end"]:
            sink.add_arguments("{}" if self.separator == "{" else "}")
            sink.end_call()
            return text[found.end() :], self.format.after_call(self.next_stage)
        key = groups["key"].strip()
        is_string = groups.get("string")
        kinds = (_TEXT if is_string == "true" else frozenset()) if is_string else find_kinds(self.schema, key)
        sink.add_arguments(f"{self.separator}{_to_json(key)}: ")
        self.separator = ", "
        return text[found.end() :], _Text(self) if kinds == _TEXT else _Value(self, kinds)


@dataclass(slots=True)
class _Text:
    """A string parameter. It is passed on unchanged, except for the line breaks next to its tags."""

    parameters: _Parameters
    started: bool = False
    is_reasoning = False

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        end = self.parameters.format.value_end
        if not self.started:
            if not text or (text == "\n" and not final):
                return text, self
            self.started = True
            sink.add_arguments('"')
            text = text.removeprefix("\n")
        at = text.find(end)
        if at >= 0:
            sink.add_arguments(_to_json(text[:at].removesuffix("\n"))[1:-1] + '"')
            return text[at + len(end) :], self.parameters
        keep = 0 if final else count_overlap(text, (f"\n{end}", end))
        sink.add_arguments(_to_json(text[: len(text) - keep])[1:-1])
        return text[len(text) - keep :], self


@dataclass(slots=True)
class _Value:
    """A parameter of another type. It is converted once it is complete."""

    parameters: _Parameters
    kinds: frozenset[str]
    """JSON types that the value may have. Empty: any."""
    seen: int = 0
    is_reasoning = False

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        end = self.parameters.format.value_end
        at = text.find(end, max(0, self.seen - len(end)))
        self.seen = len(text)
        if at >= 0:
            sink.add_arguments(_convert(text[:at], self.kinds))
            return text[at + len(end) :], self.parameters
        if final:
            sink.add_arguments(text)  # incomplete, but not dropped
            return "", self
        return text, self


def find_kinds(schema: Any, key: str) -> frozenset[str]:
    """Return the JSON types that a parameter schema allows for `key`, or an empty set if it declares none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    declared = properties.get(key) if isinstance(properties, dict) else None
    branches = next((declared[name] for name in ("anyOf", "oneOf") if declared.get(name)), None) if isinstance(declared, dict) else None
    each = [_declared_kinds(branch) for branch in (branches if isinstance(branches, list) else [declared])]
    return frozenset().union(*each) if all(each) else frozenset()


def _declared_kinds(schema: Any) -> frozenset[str]:
    declared_type = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(declared_type, str | list):
        return frozenset([declared_type] if isinstance(declared_type, str) else (kind for kind in declared_type if isinstance(kind, str)))
    values = schema.get("enum") if isinstance(schema, dict) else None
    return _TEXT if isinstance(values, list) and all(isinstance(value, str) for value in values) else frozenset()


def _convert(text: str, kinds: frozenset[str]) -> str:
    """Return a value as JSON: unchanged if it is JSON of an allowed type, also with Python's words (`True`, `None`), else as a string.

    An optional string (a schema of string or null) is a string even if it reads as a number.
    """
    bare = text.strip()
    bare = {"True": "true", "False": "false", "None": "null"}.get(bare, bare)
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _string_to_json(text)
    return _string_to_json(text) if "string" in kinds and not kinds & _KINDS[type(value)] else bare


def _string_to_json(text: str) -> str:
    return _to_json(text.removeprefix("\n").removesuffix("\n"))


def _to_json(text: str) -> str:
    return msgspec.json.encode(text).decode()
