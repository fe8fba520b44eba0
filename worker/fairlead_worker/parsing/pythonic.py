"""Calls written as Python: `[get_weather(city="Paris"), now()]` (Llama 3.2 and 4)."""

import ast
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fairlead_worker.parsing.gap import Gap
from fairlead_worker.parsing.head import Head
from fairlead_worker.parsing.scanner import Scanner
from fairlead_worker.parsing.stage import Out, Stage

_HEAD = r"\s*\[\s*(?P<name>[A-Za-z_][\w.]{0,255})\s*\("
_CLOSE = r"\s*<\|python_end\|>"
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """Python between markers that some models leave out."""

    markers: tuple[str, ...] = ("<|python_start|>",)
    at_start: str = "["

    def stage(self, opening: str, back: Stage) -> Stage:
        return _head(opening, back)


def _head(opening: str, back: Stage) -> Stage:
    """A list of calls may begin here."""
    return Head([(_HEAD, lambda found, text, out: (text, _Calls(opening, back)))], opening, back)


@dataclass(slots=True)
class _Calls:
    """A list of calls, held until it is whole: what its names and quotes mean is known then."""

    raw: str
    back: Stage
    scanner: Scanner = field(default_factory=lambda: Scanner("\"'", outside=None))
    parts: list[str] = field(default_factory=list)
    thinks = False

    def take(self, text: str, final: bool, out: Out) -> tuple[str, Stage]:
        used, ended = self.scanner.scan(text)
        self.parts.append(text[:used])
        if not ended and not final:
            return "", self
        written = "".join(self.parts)
        calls = _read(written.strip()) if ended else None
        if not calls or any(name not in out.tools.schemas for name, _ in calls):
            out.text(self.raw + written)
            return text[used:], self.back
        for name, arguments in calls[:1] if out.tools.one else calls:
            out.begin(name)
            out.arguments(msgspec.json.encode(arguments).decode())
            out.end()
        return text[used:], Gap(_CLOSE, lambda: _head("", self.back), self.back)


def _read(written: str) -> list[tuple[str, dict[str, Any]]] | None:
    """(name, arguments) of each call; None for anything else. Nothing is run: only literals are read."""
    try:
        tree = ast.parse(written, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(tree, ast.List) or not tree.elts:
        return None
    calls = []
    for call in tree.elts:
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            return None
        try:
            arguments = {str(word.arg): _value(word.value) for word in call.keywords}
            msgspec.json.encode(arguments)
            calls.append((ast.unparse(call.func), arguments))
        except (ValueError, TypeError, RecursionError, OverflowError):
            return None
    return calls


def _value(node: ast.expr) -> Any:
    """A literal, with JSON's words too."""
    match node:
        case ast.Name(id) if id in _WORDS:
            return _WORDS[id]
        case ast.List(elts) | ast.Tuple(elts):
            return [_value(each) for each in elts]
        case ast.Dict(keys, values):
            return {str(_value(key)) if key is not None else "": _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            value = ast.literal_eval(node)
            if not isinstance(value, str | int | float | bool | None):
                raise ValueError("no JSON")
            return value
