"""The stage after a marker: the head of a call of a known tool, or plain text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fairlead_worker.parsing.pattern import match
from fairlead_worker.parsing.stage import EventSink, Stage

if TYPE_CHECKING:
    import regex

NAME: Final = r'(?P<name>[^"\\\s<>{}\[\]｜]{1,256})'
"""The tool name's group, for head patterns."""
HeadHandler = Callable[["regex.Match[str]", str, EventSink], tuple[str, Stage]]
"""Returns the rest of the text and the next stage for a matched head."""


@dataclass(slots=True)
class CallHead(Stage):
    """A call may begin here."""

    patterns: Sequence[tuple[str, HeadHandler]]
    """Head patterns with their handlers. The first match wins. The group `name` names the called tool."""
    opening: str
    """The text that was read as the marker. It is plain text if no call follows."""
    next_stage: Stage
    forced: bool = False
    """True if a grammar forces the call: an incomplete head is then no text."""

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        for pattern, handler in self.patterns:
            found = match(pattern, text, partial=self.forced or not final)
            if found is not None and found.partial:
                return ("" if final else text), self
            if found is not None:
                name = found.groupdict().get("name")
                if name is not None and name not in sink.tools.schemas:
                    break
                return handler(found, text, sink)
        sink.add_text(self.opening)
        return text, self.next_stage
