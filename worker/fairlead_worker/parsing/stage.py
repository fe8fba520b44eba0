"""Building blocks of the parsers: stages that consume text as it arrives, and the sink for their events.

A stage consumes the text that it can decide, and returns the rest, which it gets again together with later text. Its decisions must depend
on the text alone and not on how it was split. Then the events of a stream always gather to the same message.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fairlead_worker.parsing.events import TOOL_CALLS, CallArguments, CallStart, Event, Reasoning, Text


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools that an answer may call: parameter schemas by name."""

    schemas: Mapping[str, Any] = field(default_factory=dict)
    at_most_one: bool = False
    """Allow one call at most (`parallel_tool_calls: false`)."""


NewId = Callable[[str, int, str], str]
"""Returns the id of a call from its function's name, its number in the conversation, and what the model wrote as its id, or ""."""


def call_id(name: str, number: int, written: str) -> str:
    """Return an id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id(name: str, number: int, written: str) -> str:
    """Return an id of nine letters or digits, the only format that Mistral's templates accept."""
    return written if len(written) == 9 and written.isascii() and written.isalnum() else secrets.token_hex(5)[:9]


def kimi_call_id(name: str, number: int, written: str) -> str:
    """Return an id as Kimi K2 writes it and reads it in the next prompt: `functions.NAME:NUMBER`."""
    return f"functions.{name}:{int(written) if written.isdecimal() else number}"


class EventSink:
    """Collects the events of the stages. Whitespace between text, reasoning and calls belongs to none of them."""

    def __init__(self, tools: Tools, new_id: NewId = call_id, earlier_calls: int = 0) -> None:
        self.tools = tools
        self.num_calls = 0
        self.num_complete_calls = 0
        """Calls whose arguments are complete and valid JSON."""
        self._new_id = new_id
        self._earlier_calls = earlier_calls
        self._ids: set[str] = set()
        self._events: list[Event] = []
        self._blank = ""
        """Whitespace after text, which is dropped if a call follows."""
        self._reasoning_blank = ""
        self._strip_leading = False
        """True right after reasoning or a call: drop leading whitespace."""
        self._in_reasoning = False
        self._arguments: list[str] = []
        self.is_certain = True
        """False if a torn tag leaves open where a value ends."""
        self.markup: tuple[str, ...] = ()
        """Tags that have their place in calls only."""
        self._after_calls: list[str] = []

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def add_text(self, text: str) -> None:
        if self._strip_leading:
            text = text.lstrip()
        text = self._blank + text
        kept = text.rstrip() if self.tools.schemas else text
        self._blank = text[len(kept) :]
        if kept:
            self._strip_leading = False
            self._events.append(Text(kept))
            if self.markup:
                self._after_calls.append(kept)

    def add_reasoning(self, text: str) -> None:
        text = self._reasoning_blank + text if self._in_reasoning else text.lstrip()
        kept = text.rstrip()
        self._reasoning_blank = text[len(kept) :]
        if kept:
            self._in_reasoning = True
            self._events.append(Reasoning(kept))

    def end_reasoning(self) -> None:
        """Mark the end of the reasoning."""
        self._strip_leading = True

    def begin_call(self, name: str, written_id: str = "") -> None:
        """Start a call of a tool in `tools`. `written_id`: what the model wrote as its id."""
        self._blank, self._strip_leading, self._arguments = "", True, []
        number = self._earlier_calls + self.num_calls
        id = self._new_id(name, number, written_id)
        while id in self._ids:  # a model may write one twice, and clients find a call by its id
            id = self._new_id(name, number, "")
            number += 1
        self._ids.add(id)
        self._events.append(CallStart(self.num_calls, id, name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        if text:
            self._arguments.append(text)
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """Mark the end of the call's arguments."""
        try:
            msgspec.json.decode("".join(self._arguments), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return
        self.num_complete_calls += 1

    def has_whole_calls(self) -> bool:
        """Return whether there are calls, all of them complete and without doubt."""
        if not self.num_calls or self.num_complete_calls < self.num_calls or not self.is_certain:
            return False
        text = "".join(self._after_calls)
        return not any(tag in text for tag in self.markup)

    def close(self) -> None:
        """Mark the end of the answer. Trailing whitespace is text if no call follows it."""
        if self._blank and not self._strip_leading:
            self._events.append(Text(self._blank))
        self._blank = ""


class Stage:
    """A state of the parser within an answer."""

    __slots__ = ()
    is_reasoning = False
    """True if tokens in this stage are reasoning."""

    def consume(self, text: str, final: bool, sink: EventSink) -> "tuple[str, Stage]":
        """Return (text to be read again, the stage that reads it). `final`: no more text comes, and unread text is dropped."""
        raise NotImplementedError


class PlainText(Stage):
    """The stage of plain text."""

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        sink.add_text(text)
        return "", self


class Parser:
    """Parses one answer. The gathered events do not depend on how the text is split."""

    def __init__(self, stage: Stage, tools: Tools, new_id: NewId = call_id, earlier_calls: int = 0) -> None:
        self.reasoning_tokens = 0
        """Reasoning tokens, including the markers."""
        self._stage = stage
        self._sink = EventSink(tools, new_id, earlier_calls)
        self._held = ""

    @property
    def complete(self) -> bool:
        """True if the answer may have one call only and that call is complete."""
        return self._sink.tools.at_most_one and self._sink.num_complete_calls > 0

    def feed(self, text: str, token: bool = True) -> list[Event]:
        """Parse the text of the next token, which may be empty. `token` is False for text without a token, at the end."""
        was_reasoning = self._stage.is_reasoning
        if text:
            self._held += text
            self._run(final=False)
        self.reasoning_tokens += token and (was_reasoning or self._stage.is_reasoning)
        return self._sink.drain()

    def finish(self, reason: str) -> tuple[list[Event], str]:
        """Return (events of the held-back text, finish reason for the client). `reason`: why the sequence ended, `stop` or `length`."""
        self._run(final=True)
        self._sink.close()
        ended = reason == "stop" and self._sink.has_whole_calls()
        return self._sink.drain(), TOOL_CALLS if ended else reason

    def _run(self, final: bool) -> None:
        while not self.complete:
            stage, before = self._stage, len(self._held)
            self._held, self._stage = stage.consume(self._held, final, self._sink)
            if self._stage is stage and len(self._held) == before:
                return
        self._held = ""


def get_properties(schema: Any) -> dict[str, Any]:
    """Return the schemas of a tool's parameters by name."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def find_marker(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Return (position, marker) of the first marker in a text, the longest one at that position. Return (-1, "") if there is none."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return -1, ""
    at, _, marker = min(found)
    return at, marker


def count_overlap(text: str, markers: Sequence[str]) -> int:
    """Return the length of the text's longest suffix that may be the start of a marker."""
    longest = max(map(len, markers), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(marker.startswith(text[-n:]) for marker in markers)), 0)
