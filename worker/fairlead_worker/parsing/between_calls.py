"""The stage after a call: another call follows, the calls end, or other text follows."""

from collections.abc import Callable
from dataclasses import dataclass

from fairlead_worker.parsing.pattern import match
from fairlead_worker.parsing.stage import EventSink, Stage


@dataclass(slots=True)
class BetweenCalls(Stage):
    """Consumes closing markup. Returns text that is not markup to the next stage."""

    tail: str
    """Pattern with the group `more` where another call begins, `close` after the last call, or `part` of the markup before one of these.
    Empty: calls have no closing markup."""
    next_call: Callable[[], Stage]
    """Creates the stage of another call, which starts at `more`."""
    next_stage: Stage

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        found = match(self.tail, text, partial=True) if self.tail else None
        if found is None:
            return text, self.next_stage
        if found.partial:
            return ("" if final else text), self
        if found.groupdict().get("more"):
            return text[found.start("more") :], self.next_call()
        return text[found.end() :], self if found.groupdict().get("part") else self.next_stage
