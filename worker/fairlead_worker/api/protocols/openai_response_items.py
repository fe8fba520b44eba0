"""The output items of a response and their stream events. Whole responses are built from the same items."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from fairlead_common.protocols.conversion import OfferedTool
from fairlead_worker.api.answers.completions import TokenLogprob
from fairlead_worker.api.answers.responses import (
    ContentPartEvent,
    ItemEvent,
    MessageItem,
    OutputItem,
    OutputItemEvent,
    OutputText,
    ReasoningItem,
    ReasoningText,
    TextDeltaEvent,
    TextDoneEvent,
)
from fairlead_worker.api.protocols.call_items import CallItem, complete_call
from fairlead_worker.parsing.events import CallArguments, CallStart, Event, Reasoning, Text

Status = Literal["completed", "incomplete"]


class ResponseItems:
    """Builds output items. `add` events of an answer, then `finish`; both yield the stream's events without sequence numbers."""

    def __init__(self, id: str, tools: Mapping[str, OfferedTool]) -> None:
        """`id`: the request id, from which the item ids are made. `tools`: those that are no plain function in the API."""
        self.items: list[OutputItem] = []
        """The last one is replaced when it is complete, so that the event of its start keeps the empty one."""
        self._id = id
        self._tools = tools
        self._call: CallItem | None = None
        """The last item if it is a call."""
        self._is_open = False
        self._text: list[str] = []
        """Text of the open item so far."""
        self._logprobs: list[TokenLogprob] = []
        """Log-probabilities of the open item's tokens so far."""
        self._pending_logprobs: list[TokenLogprob] = []

    def add(self, events: Iterable[Event], logprobs: list[TokenLogprob]) -> Iterator[ItemEvent]:
        """Yield the stream's events. `logprobs`: of the tokens of `events`. Text shows them, also those of earlier tokens without text."""
        self._pending_logprobs += logprobs
        for event in events:
            match event:
                case Text(text):
                    if not (self._is_open and isinstance(self.items[-1], MessageItem)):
                        yield from self._open_message()
                    shown, self._pending_logprobs = self._pending_logprobs, []
                    self._logprobs += shown
                    self._text.append(text)
                    yield TextDeltaEvent("response.output_text.delta", self.items[-1].id, self._place, 0, text, shown)
                case Reasoning(text):
                    self._pending_logprobs = []
                    if not (self._is_open and isinstance(self.items[-1], ReasoningItem)):
                        yield from self._close("completed")
                        yield self._begin(ReasoningItem(id=self._new_id("rs")))
                        yield self._part_added(ReasoningText(""))
                    self._text.append(text)
                    yield TextDeltaEvent("response.reasoning_text.delta", self.items[-1].id, self._place, 0, text)
                case CallStart(_, id, name):
                    yield from self._close("completed")
                    self._call = CallItem(name, self._tools.get(name), len(self.items))
                    yield self._begin(self._call.begin(f"{self._id}_{len(self.items)}", id))
                case CallArguments(_, text):
                    self._pending_logprobs = []
                    assert self._call is not None
                    self._text.append(text)
                    yield from self._call.add(text)

    def finish(self, status: Status) -> Iterator[ItemEvent]:
        """Close the open item with the answer's status. An empty answer becomes an empty message."""
        if not self.items:
            yield from self._open_message()
        yield from self._close(status)

    def _open_message(self) -> Iterator[ItemEvent]:
        yield from self._close("completed")
        yield self._begin(MessageItem(id=self._new_id("msg")))
        yield self._part_added(OutputText(""))

    def _begin(self, item: OutputItem) -> ItemEvent:
        self._is_open, self._text, self._logprobs = True, [], []
        self.items.append(item)
        return OutputItemEvent("response.output_item.added", self._place, item)

    def _close(self, status: Status) -> Iterator[ItemEvent]:
        if not self._is_open:
            return
        item, text, place = self.items[-1], "".join(self._text), self._place
        match item:
            case MessageItem():
                said = OutputText(text, logprobs=self._logprobs)
                yield TextDoneEvent("response.output_text.done", item.id, place, 0, text, self._logprobs)
                yield ContentPartEvent("response.content_part.done", item.id, place, 0, said)
                item = msgspec.structs.replace(item, content=[said], status=status)
            case ReasoningItem():
                thought = ReasoningText(text)
                yield TextDoneEvent("response.reasoning_text.done", item.id, place, 0, text)
                yield ContentPartEvent("response.content_part.done", item.id, place, 0, thought)
                item = msgspec.structs.replace(item, content=[thought], status=status)
            case _:
                assert self._call is not None
                yield from self._call.finish(text)
                item = complete_call(item, text)
                item.status = status
        self.items[-1] = item
        yield OutputItemEvent("response.output_item.done", place, item)
        self._is_open = False

    def _part_added(self, part: OutputText | ReasoningText) -> ItemEvent:
        return ContentPartEvent("response.content_part.added", self.items[-1].id, self._place, 0, part)

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id}_{len(self.items)}"

    @property
    def _place(self) -> int:
        """The `output_index` of the last item."""
        return len(self.items) - 1
