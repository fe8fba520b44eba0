"""Tool calls written as Python: `[get_weather(city="Paris"), now()]` (Llama 3.2 and 4)."""

import ast
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fairlead_worker.parsing.between_calls import BetweenCalls
from fairlead_worker.parsing.call_head import CallHead
from fairlead_worker.parsing.scanner import Scanner, escape_controls
from fairlead_worker.parsing.stage import EventSink, Stage

_HEAD = r"\s*\[\s*(?P<name>[A-Za-z_][\w.]{0,255})\s*\("
_CLOSE = r"\s*<\|python_end\|>"
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """Python between markers, which some models omit."""

    markers: tuple[str, ...] = ("<|python_start|>",)
    at_start: str = "["

    def stage(self, opening: str, next_stage: Stage) -> Stage:
        return _head(opening, next_stage)


def _head(opening: str, next_stage: Stage) -> Stage:
    """Return the stage in which a list of calls may begin."""
    return CallHead([(_HEAD, lambda found, text, sink: (text, _Calls(opening, next_stage)))], opening, next_stage)


@dataclass(slots=True)
class _Calls(Stage):
    """A list of calls. It is held until it is complete, because only then are its names and quotes known."""

    raw: str
    next_stage: Stage
    scanner: Scanner = field(default_factory=lambda: Scanner("\"'", outside=None))
    parts: list[str] = field(default_factory=list)

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        used, ended = self.scanner.scan(text)
        self.parts.append(text[:used])
        if not ended and not final:
            return "", self
        written = "".join(self.parts)
        calls = _parse_calls(written.strip()) if ended else None
        if not calls or any(name not in sink.tools.schemas for name, _ in calls):
            sink.add_text(self.raw + written)
            return text[used:], self.next_stage
        for name, arguments in calls[:1] if sink.tools.at_most_one else calls:
            sink.begin_call(name)
            sink.add_arguments(msgspec.json.encode(arguments).decode())
            sink.end_call()
        return text[used:], BetweenCalls(_CLOSE, lambda: _head("", self.next_stage), self.next_stage)


def _parse_calls(written: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return (name, arguments) of each call, or None for anything else. Only literals are read; nothing is executed."""
    try:
        tree = ast.parse(escape_controls(written), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(tree, ast.List) or not tree.elts:
        return None
    calls = []
    for call in tree.elts:
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            return None
        try:
            arguments = {str(word.arg): _parse_literal(word.value) for word in call.keywords}
            msgspec.json.encode(arguments)
            calls.append((ast.unparse(call.func), arguments))
            if len(arguments) < len(call.keywords):  # one came twice
                return None
        except (ValueError, TypeError, RecursionError, OverflowError):
            return None
    return calls


def parse_literal(written: str) -> Any:
    """Return the JSON value of a Python literal, in which JSON's words are allowed too; None for anything else."""
    try:
        value = _parse_literal(ast.parse(written, mode="eval").body)
        msgspec.json.encode(value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError):
        return None
    return value


def _parse_literal(node: ast.expr) -> Any:
    """Return the value of a literal. JSON's `true`, `false` and `null` are allowed too."""
    match node:
        case ast.Name(id) if id in _WORDS:
            return _WORDS[id]
        case ast.List(elts) | ast.Tuple(elts):
            return [_parse_literal(each) for each in elts]
        case ast.Dict(keys, values) if None not in keys:  # it stands for `**`
            return {str(_parse_literal(key)): _parse_literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case _:
            value = ast.literal_eval(node)
            if not isinstance(value, str | int | float | bool | None) or (isinstance(value, float) and not math.isfinite(value)):
                raise ValueError("no JSON")
            return value
