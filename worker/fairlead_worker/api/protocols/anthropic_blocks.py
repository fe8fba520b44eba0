"""The content blocks of an Anthropic message and their stream events. Whole responses are built from the same blocks."""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from fairlead_worker.api.answers.messages import (
    BlockDelta,
    BlockDeltaEvent,
    BlockEvent,
    BlockStartEvent,
    BlockStopEvent,
    ContentBlock,
    InputJsonDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from fairlead_worker.parsing.events import CallArguments, CallStart, Event, Reasoning, Text


class MessageBlocks:
    """Builds content blocks. `add` events of an answer, then `finish`; both yield the stream's events."""

    def __init__(self, hide_thinking: bool = False) -> None:
        """`hide_thinking`: thinking blocks exist but are empty."""
        self.blocks: list[ContentBlock] = []
        self._hide_thinking = hide_thinking
        self._is_open = False
        self._text: list[str] = []
        """Text of the open block so far."""

    def add(self, events: Iterable[Event]) -> Iterator[BlockEvent]:
        for event in events:
            match event:
                case Text(text):
                    yield from self._open(TextBlock)
                    yield self._delta(TextDelta(text), text)
                case Reasoning(text):
                    yield from self._open(ThinkingBlock)
                    if not self._hide_thinking:
                        yield self._delta(ThinkingDelta(text), text)
                case CallStart(_, id, name):
                    yield from self._close()
                    yield self._begin(ToolUseBlock(id, name, {}))
                case CallArguments(_, text):
                    yield self._delta(InputJsonDelta(text), text)

    def finish(self) -> Iterator[BlockEvent]:
        """Close the open block. An empty answer becomes an empty text block."""
        if not self.blocks:
            yield from self._open(TextBlock)
        yield from self._close()

    def _open(self, kind: type[TextBlock | ThinkingBlock]) -> Iterator[BlockEvent]:
        """Open a block of this kind, unless one is open."""
        if not (self._is_open and isinstance(self.blocks[-1], kind)):
            yield from self._close()
            yield self._begin(kind())

    def _begin(self, block: ContentBlock) -> BlockEvent:
        self._is_open, self._text = True, []
        self.blocks.append(block)
        return BlockStartEvent(len(self.blocks) - 1, block)

    def _delta(self, delta: BlockDelta, text: str) -> BlockEvent:
        self._text.append(text)
        return BlockDeltaEvent(len(self.blocks) - 1, delta)

    def _close(self) -> Iterator[BlockEvent]:
        """Replace the open block by the whole one: the event of its start keeps the empty one."""
        if not self._is_open:
            return
        text = "".join(self._text)
        match self.blocks[-1]:
            case TextBlock():
                self.blocks[-1] = TextBlock(text)
            case ThinkingBlock():
                self.blocks[-1] = ThinkingBlock(text)
            case ToolUseBlock(id=id, name=name):
                self.blocks[-1] = ToolUseBlock(id, name, _arguments(text))
        yield BlockStopEvent(len(self.blocks) - 1)
        self._is_open = False


def _arguments(text: str) -> Any:
    """Return a call's arguments. Parse truncated JSON as far as possible, as Anthropic's own clients do."""
    try:
        return from_json(text, allow_partial=True) if text.strip() else {}
    except ValueError:
        return {}
