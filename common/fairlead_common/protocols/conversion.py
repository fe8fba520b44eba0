"""The result of a conversion to a chat, and what the chat does not have of the body."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_SHOWN = 10
"""Kinds in one list: the lists become a response header."""
MAX_FIELD = 100
"""Characters of a field's name: proxies refuse headers above 8 KiB."""


class Omissions:
    """What a conversion leaves out, and what it passes on as text only. Each kind is noted once, with the first field that has it."""

    def __init__(self) -> None:
        self._left_out: dict[str, str] = {}
        self._as_text: dict[str, str] = {}

    def leave_out(self, field: str, kind: Any = "") -> None:
        """Note a part that the model does not get. `kind`: its type, as the client wrote it; empty if the field says it."""
        self._note(self._left_out, field, kind)

    def pass_as_text(self, field: str, kind: Any) -> None:
        """Note a part that the model gets as plain text."""
        self._note(self._as_text, field, kind)

    def describe(self) -> list[str]:
        """Return a sentence for each of the two lists that is not empty, in ASCII and on one line."""
        lists = (("left out", self._left_out), ("passed as text", self._as_text))
        return [f"{what}: {', '.join(f'{kind} {at}'.strip() for kind, at in noted.items())}" for what, noted in lists if noted]

    def _note(self, noted: dict[str, str], field: str, kind: Any) -> None:
        name = kind if isinstance(kind, str) and len(kind) <= 64 and kind.isascii() and kind.isidentifier() else "unknown" if kind else ""
        field = field if len(field) <= MAX_FIELD else f"{field[:MAX_FIELD]}..."
        key = name or field
        if key not in noted and len(noted) < MAX_SHOWN:
            noted[key] = field if name else ""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that is a function in the chat and has another form in the API."""

    kind: Literal["function", "custom", "local_shell", "tool_search"]
    name: str
    """As the client knows it."""
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Conversion:
    """A body as a chat."""

    chat: dict[str, Any]
    omissions: Omissions
    tool_fields: Sequence[str] = ()
    """The field of the body that each of the chat's tools comes from, for errors."""
    tools: Mapping[str, OfferedTool] = field(default_factory=dict)
    """Tools with another form, by their name in the chat."""
