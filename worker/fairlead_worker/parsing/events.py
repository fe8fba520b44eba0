"""What an answer consists of, in the order in which it was generated. Streamed answers show the events, whole ones gather the same events:
so the two cannot differ."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that ended by itself, with calls that are all whole."""


@dataclass(frozen=True, slots=True)
class Text:
    """Some of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The answer calls a tool; its arguments follow. `index`: 0 for an answer's first call."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Some of the text of a call's arguments: JSON, once all of it is there."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | CallArguments


class AnswerParser(Protocol):
    """Reads one answer. How its text is cut into pieces makes no difference to what the events gather to."""

    reasoning_tokens: int
    """Tokens that were reasoning, its markers included."""

    @property
    def complete(self) -> bool:
        """Nothing more is wanted of this answer: it may call one tool only, and has."""

    def feed(self, text: str, token: bool = True) -> list[Event]:
        """The text that came with the next token, which may be none; `token` is false for what comes without one, at the end."""

    def finish(self, reason: str) -> tuple[list[Event], str]:
        """(what was held back, why the answer ended for its client). `reason`: why the sequence ended: `stop` or `length`."""


@dataclass(slots=True)
class Call:
    """A whole call, or as much of it as there is."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A whole answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def gather(events: Iterable[Event]) -> Message:
    """The message that events amount to."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Call] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Text(text):
                texts.append(text)
            case Reasoning(text):
                thoughts.append(text)
            case CallStart(_, id, name):
                calls.append(Call(id, name))
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    for call, parts in zip(calls, arguments, strict=True):
        call.arguments = "".join(parts)
    return Message("".join(texts), "".join(thoughts), calls)
