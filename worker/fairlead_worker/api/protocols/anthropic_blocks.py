"""The content blocks of an Anthropic message and their stream events. Whole responses are built from the same blocks."""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from fairlead_worker.parsing.events import CallArguments, CallStart, Event, Reasoning, Text

Json = dict[str, Any]
_CONTENT_KEYS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
"""Payload key by block type."""
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"), "tool_use": ("input_json_delta", "partial_json")}


class MessageBlocks:
    """Builds content blocks. `add` events of an answer, then `finish`; both yield the stream's events."""

    def __init__(self, hide_thinking: bool = False) -> None:
        """`hide_thinking`: thinking blocks exist but are empty."""
        self.blocks: list[Json] = []
        self._hide_thinking = hide_thinking
        self._open: Json | None = None
        self._text: list[str] = []
        """Text of the open block so far."""

    def add(self, events: Iterable[Event]) -> Iterator[Json]:
        for event in events:
            match event:
                case Text(text):
                    yield from self._open_block("text", {"text": ""})
                    yield self._delta(text)
                case Reasoning(text):
                    # Only the service that signs thinking can verify a signature. This worker sends an empty one and requires none.
                    yield from self._open_block("thinking", {"thinking": "", "signature": ""})
                    if not self._hide_thinking:
                        yield self._delta(text)
                case CallStart(_, id, name):
                    yield from self._close()
                    yield self._begin({"type": "tool_use", "id": id, "name": name, "input": {}})
                case CallArguments(_, text):
                    yield self._delta(text)

    def finish(self) -> Iterator[Json]:
        """Close the open block. An empty answer becomes an empty text block."""
        if not self.blocks:
            yield from self._open_block("text", {"text": ""})
        yield from self._close()

    def _open_block(self, kind: str, empty: Json) -> Iterator[Json]:
        """Open a block of this kind, unless one is open."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield self._begin({"type": kind, **empty})

    def _begin(self, block: Json) -> Json:
        self._open, self._text = block, []
        self.blocks.append(block)
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, text: str) -> Json:
        assert self._open is not None
        self._text.append(text)
        kind, name = _DELTAS[self._open["type"]]
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, name: text}}

    def _close(self) -> Iterator[Json]:
        if (block := self._open) is None:
            return
        text = "".join(self._text)
        block[_CONTENT_KEYS[block["type"]]] = _arguments(text) if block["type"] == "tool_use" else text
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}
        self._open = None


def _arguments(text: str) -> Any:
    """Return a call's arguments. Parse truncated JSON as far as possible, as Anthropic's own clients do."""
    try:
        return from_json(text, allow_partial=True) if text.strip() else {}
    except ValueError:
        return {}
