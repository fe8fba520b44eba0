"""The parts of an answer in generation order.

Streams show the events, and whole responses gather the same events, so that the two cannot differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that ended on its own and whose calls are all complete."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call, whose arguments follow. `index`: 0 for the answer's first call."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which are JSON once they are complete."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class Call:
    """A call, complete or cut off."""

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
    """Return the message that the events add up to."""
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
