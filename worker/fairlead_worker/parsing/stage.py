"""What the parsers are made of: stages that take text as it comes, and the place where their events go.

A stage consumes what can be decided of the text so far and leaves the rest, to be seen again with what comes next. What it decides must
follow from the text alone, not from how it was cut: then a stream's events gather to the same message whatever its pieces were.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from fairlead_worker.parsing.events import TOOL_CALLS, CallArguments, CallStart, Event, Reasoning, Text


@dataclass(frozen=True, slots=True)
class Tools:
    """What an answer may call: schemas of parameters by name."""

    schemas: Mapping[str, Any] = field(default_factory=dict)
    at_most_one: bool = False
    """At most one call (`parallel_tool_calls: false`)."""


def call_id() -> str:
    """As OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters or digits: Mistral's templates take no other."""
    return secrets.token_hex(5)[:9]


class EventSink:
    """Where a stage's findings go. Blanks between text, reasoning and calls belong to none of them."""

    def __init__(self, tools: Tools, new_id: Callable[[], str] = call_id) -> None:
        self.tools = tools
        self.num_calls = 0
        self.num_complete_calls = 0
        """Calls whose arguments are all there, and JSON."""
        self._new_id = new_id
        self._events: list[Event] = []
        self._blank = ""
        """Blanks after text, that a call may follow."""
        self._reasoning_blank = ""
        self._strip_leading = False
        """Blanks are to be left out: reasoning has just ended."""
        self._in_reasoning = False
        self._arguments: list[str] = []

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

    def add_reasoning(self, text: str) -> None:
        text = self._reasoning_blank + text if self._in_reasoning else text.lstrip()
        kept = text.rstrip()
        self._reasoning_blank = text[len(kept) :]
        if kept:
            self._in_reasoning = True
            self._events.append(Reasoning(kept))

    def end_reasoning(self) -> None:
        """Reasoning has ended."""
        self._strip_leading = True

    def begin_call(self, name: str) -> None:
        """A call of a tool that `tools` has."""
        self._blank, self._strip_leading, self._arguments = "", True, []
        self._events.append(CallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        if text:
            self._arguments.append(text)
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """The call's arguments are all there."""
        try:
            msgspec.json.decode("".join(self._arguments), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return
        self.num_complete_calls += 1

    def close(self) -> None:
        """The answer has ended: blanks that no call has followed are its text."""
        if self._blank and not self._strip_leading:
            self._events.append(Text(self._blank))
        self._blank = ""


class Stage(Protocol):
    """Something that an answer may be in the middle of."""

    @property
    def is_reasoning(self) -> bool:
        """Whether its tokens are reasoning."""

    def consume(self, text: str, final: bool, sink: EventSink) -> "tuple[str, Stage]":
        """(text to be seen again, by whom). `final`: no more text comes; what is left is left out."""


class PlainText:
    """Nothing but text."""

    is_reasoning = False

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        sink.add_text(text)
        return "", self


class Parser:
    """Implements `events.AnswerParser` with stages."""

    def __init__(self, stage: Stage, tools: Tools, new_id: Callable[[], str] = call_id) -> None:
        self.reasoning_tokens = 0
        self._stage = stage
        self._sink = EventSink(tools, new_id)
        self._held = ""

    @property
    def complete(self) -> bool:
        return self._sink.tools.at_most_one and self._sink.num_complete_calls > 0

    def feed(self, text: str, token: bool = True) -> list[Event]:
        thought = self._stage.is_reasoning
        if text:
            self._held += text
            self._run(final=False)
        self.reasoning_tokens += token and (thought or self._stage.is_reasoning)
        return self._sink.drain()

    def finish(self, reason: str) -> tuple[list[Event], str]:
        self._run(final=True)
        self._sink.close()
        ended = reason == "stop" and self._sink.num_calls > 0 and self._sink.num_complete_calls == self._sink.num_calls
        return self._sink.drain(), TOOL_CALLS if ended else reason

    def _run(self, final: bool) -> None:
        while not self.complete:
            stage, before = self._stage, len(self._held)
            self._held, self._stage = stage.consume(self._held, final, self._sink)
            if self._stage is stage and len(self._held) == before:
                return
        self._held = ""


def first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """(where, which) of the first marker in a text; of two at one place the longer. (-1, "") where there is none."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return -1, ""
    at, _, marker = min(found)
    return at, marker


def overlap(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of a text that may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(marker.startswith(text[-n:]) for marker in markers)), 0)
