"""Behind a marker: the head of a call of a tool that there is, or text after all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fairlead_worker.parsing.pattern import match
from fairlead_worker.parsing.stage import EventSink, Stage

if TYPE_CHECKING:
    import regex

NAME: Final = r'(?P<name>[^"\\\s<>{}\[\]｜]{1,256})'
"""A tool's name, for the patterns of heads."""
HeadHandler = Callable[["regex.Match[str]", str, EventSink], tuple[str, Stage]]
"""What follows a head that was found in a text."""


@dataclass(slots=True)
class CallHead:
    """A call may begin here."""

    patterns: Sequence[tuple[str, HeadHandler]]
    """Patterns of heads, the first that fits is taken; one that has a `name` is of a call of that tool."""
    opening: str
    """What was taken for its marker; text, should no call follow."""
    next_stage: Stage
    forced: bool = False
    """A grammar makes the call: the beginning of one that was cut is no text."""
    is_reasoning = False

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        for pattern, taken in self.patterns:
            found = match(pattern, text, partial=self.forced or not final)
            if found is not None and found.partial:
                return ("" if final else text), self
            if found is not None:
                name = found.groupdict().get("name")
                if name is not None and name not in sink.tools.schemas:
                    break
                return taken(found, text, sink)
        sink.add_text(self.opening)
        return text, self.next_stage
