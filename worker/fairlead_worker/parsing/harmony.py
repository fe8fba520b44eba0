"""Harmony, the format of gpt-oss: an answer consists of messages, each on a channel.

`<|channel|>analysis<|message|>…<|end|>` is reasoning. The channel `final` is the answer, and `commentary` with a recipient is a call
(https://github.com/openai/harmony, docs/format.md).
"""

from dataclasses import dataclass, field

import regex

from fairlead_worker.parsing.pattern import match
from fairlead_worker.parsing.reasoning import ReasoningFormat
from fairlead_worker.parsing.scanner import Scanner
from fairlead_worker.parsing.stage import EventSink, PlainText, Stage, count_overlap, find_marker

MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_FINAL = "<|channel|>final<|message|>"
REASONING_FORMAT = ReasoningFormat("<|channel|>analysis<|message|>", f"<|end|><|start|>assistant{_FINAL}", answer=_FINAL)
"""With a grammar, an answer is optional reasoning followed by the final channel."""
_HEADER = (
    r"\s*(?:<\|start\|>)?(?:assistant)?(?:\s*to=(?P<to>[^\s<]{1,256}))?"
    r"\s*<\|channel\|>(?P<channel>\w{1,32})(?P<more>[^<]{0,512}(?:<\|constrain\|>[^<]{0,64})?)<\|message\|>"
)
_RECIPIENT = r"to=(?:functions\.)?(?P<name>[^\s<]{1,256})"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_STARTS = ("<|start|>", "<|channel|>")
"""These markers begin the next message. The others end a message."""


class Messages(Stage):
    """The stage before a message. An answer that does not begin with a message is text, because a grammar may require that."""

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        found = match(_HEADER, text, partial=not final)
        if found is not None and found.partial:
            return text, self
        if found is None:
            return text, PlainText()
        named = regex.search(_RECIPIENT, f"to={found['to']}" if found["to"] else found["more"])
        name = named["name"] if named is not None else ""
        if found["channel"] == "analysis" and not name:
            return text[found.end() :], _Body("reasoning", self, is_reasoning=True)
        if name and name in sink.tools.schemas:
            sink.begin_call(name)
            return text[found.end() :], _Body("call", self)
        if name:  # unknown tool: show its markup as text, so that nothing is lost
            sink.add_text(text[: found.end()])
        return text[found.end() :], _Body("text", self)


@dataclass(slots=True)
class _Body(Stage):
    """The content of a message."""

    kind: str
    next_stage: Stage
    is_reasoning: bool = False
    scanner: Scanner = field(default_factory=lambda: Scanner(outside=None))
    is_empty: bool = True

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        at, marker = find_marker(text, _ENDS)
        if marker:
            self._emit(text[:at], sink)
            if self.kind == "call" and self.is_empty:
                sink.add_arguments("{}")
            self._end_message(sink)
            return text[at if marker in _STARTS else at + len(marker) :], self.next_stage
        keep = 0 if final else count_overlap(text, _ENDS)
        self._emit(text[: len(text) - keep], sink)
        if final:
            self._end_message(sink)
            return "", self.next_stage
        return text[len(text) - keep :], self

    def _emit(self, text: str, sink: EventSink) -> None:
        self.is_empty &= not text.strip()
        match self.kind:
            case "reasoning":
                sink.add_reasoning(text)
            case "call":
                self.scanner.scan(text)
                sink.add_arguments(self.scanner.escape_controls(text))
            case _:
                sink.add_text(text)

    def _end_message(self, sink: EventSink) -> None:
        if self.kind == "reasoning":
            sink.end_reasoning()
        elif self.kind == "call":
            sink.end_call()
