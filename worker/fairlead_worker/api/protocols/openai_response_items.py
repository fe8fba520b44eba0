"""The output items of a response and their stream events. Whole responses are built from the same items."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from fairlead_worker.parsing.events import CallArguments, CallStart, Event, Reasoning, Text

Json = dict[str, Any]
Status = Literal["completed", "incomplete"]


class ResponseItems:
    """Builds output items. `add` events of an answer, then `finish`; both yield the stream's events without sequence numbers."""

    def __init__(self, id: str) -> None:
        """`id`: the request id, from which the item ids are made."""
        self.items: list[Json] = []
        self._id = id
        self._open: Json | None = None
        self._text: list[str] = []
        """Text of the open item so far."""
        self._logprobs: list[Json] = []
        """Log-probabilities of the open item's tokens so far."""
        self._pending_logprobs: list[Json] = []

    def add(self, events: Iterable[Event], logprobs: list[Json]) -> Iterator[Json]:
        """Yield the stream's events. `logprobs`: of the tokens of `events`. Text shows them, also those of earlier tokens without text."""
        self._pending_logprobs += logprobs
        for event in events:
            match event:
                case Text(text):
                    yield from self._open_item("message")
                    shown, self._pending_logprobs = self._pending_logprobs, []
                    self._logprobs += shown
                    yield self._delta("response.output_text.delta", text, logprobs=shown)
                case Reasoning(text):
                    self._pending_logprobs = []
                    yield from self._open_item("reasoning")
                    yield self._delta("response.reasoning_text.delta", text)
                case CallStart(_, id, name):
                    yield from self._close("completed")
                    yield self._begin({"type": "function_call", "id": self._new_id("fc"), "call_id": id, "name": name, "arguments": ""})
                case CallArguments(_, text):
                    self._pending_logprobs = []
                    yield self._delta("response.function_call_arguments.delta", text, content_index=None)

    def finish(self, status: Status) -> Iterator[Json]:
        """Close the open item with the answer's status. An empty answer becomes an empty message."""
        if not self.items:
            yield from self._open_item("message")
        yield from self._close(status)

    def _open_item(self, kind: str) -> Iterator[Json]:
        """Open an item of this kind, unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close("completed")
        if kind == "message":
            yield self._begin({"type": kind, "id": self._new_id("msg"), "role": "assistant", "content": []})
            yield self._part("added", _output_text("", []))
        else:
            yield self._begin({"type": kind, "id": self._new_id("rs"), "summary": [], "content": []})
            yield self._part("added", {"type": "reasoning_text", "text": ""})

    def _begin(self, item: Json) -> Json:
        self._open = item | {"status": "in_progress"}
        self._text, self._logprobs = [], []
        self.items.append(self._open)
        return {"type": "response.output_item.added", "output_index": self._output_index, "item": dict(self._open)}

    def _close(self, status: Status) -> Iterator[Json]:
        item, text = self._open, "".join(self._text)
        if item is None:
            return
        match item["type"]:
            case "message":
                part = _output_text(text, self._logprobs)
                yield self._item_event("response.output_text.done", text=text, logprobs=self._logprobs)
                yield self._part("done", part)
                item["content"] = [part]
            case "reasoning":
                part = {"type": "reasoning_text", "text": text}
                yield self._item_event("response.reasoning_text.done", text=text)
                yield self._part("done", part)
                item["content"] = [part]
            case _:
                yield self._item_event("response.function_call_arguments.done", content_index=None, name=item["name"], arguments=text)
                item["arguments"] = text
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": self._output_index, "item": dict(item)}
        self._open = None

    def _delta(self, kind: str, text: str, **more: Any) -> Json:
        self._text.append(text)
        return self._item_event(kind, delta=text, **more)

    def _part(self, what: str, part: Json) -> Json:
        return self._item_event(f"response.content_part.{what}", part=part)

    def _item_event(self, kind: str, content_index: int | None = 0, **more: Any) -> Json:
        """Return an event of the open item, and of its only content part if it has one."""
        assert self._open is not None
        place = {} if content_index is None else {"content_index": content_index}
        return {"type": kind, "item_id": self._open["id"], "output_index": self._output_index, **place, **more}

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id}_{len(self.items)}"

    @property
    def _output_index(self) -> int:
        return len(self.items) - 1


def _output_text(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
