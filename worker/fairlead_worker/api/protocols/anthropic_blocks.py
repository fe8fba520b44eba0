"""The content of an Anthropic message as it grows: its blocks, and the events that tell of them. Whole answers are made of the same."""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from fairlead_worker.parsing.events import CallArguments, CallStart, Event, Reasoning, Text

Json = dict[str, Any]
_CONTENT_KEYS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
"""Where a block has what it says."""
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"), "tool_use": ("input_json_delta", "partial_json")}


class MessageBlocks:
    """`add` events of an answer, then `finish` it; both give the stream's events."""

    def __init__(self, hide_thinking: bool = False) -> None:
        """`hide_thinking`: its blocks are there, and empty."""
        self.blocks: list[Json] = []
        self._hide_thinking = hide_thinking
        self._open: Json | None = None
        self._text: list[str] = []
        """Of the open block: what came so far."""

    def add(self, events: Iterable[Event]) -> Iterator[Json]:
        for event in events:
            match event:
                case Text(text):
                    yield from self._open_block("text", {"text": ""})
                    yield self._delta(text)
                case Reasoning(text):
                    # Nobody but the service that signed it could check a signature: there is none, and none is asked for.
                    yield from self._open_block("thinking", {"thinking": "", "signature": ""})
                    if not self._hide_thinking:
                        yield self._delta(text)
                case CallStart(_, id, name):
                    yield from self._close()
                    yield self._begin({"type": "tool_use", "id": id, "name": name, "input": {}})
                case CallArguments(_, text):
                    yield self._delta(text)

    def finish(self) -> Iterator[Json]:
        """An answer without a word is an empty text."""
        if not self.blocks:
            yield from self._open_block("text", {"text": ""})
        yield from self._close()

    def _open_block(self, kind: str, empty: Json) -> Iterator[Json]:
        """The open block is of that kind."""
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
    """A call's arguments; of a call that was cut off what there is, as Anthropic's own clients read half of one."""
    try:
        return from_json(text, allow_partial=True) if text.strip() else {}
    except ValueError:
        return {}
