"""After a call: another one, the end of the calls, or whatever else comes."""

from collections.abc import Callable
from dataclasses import dataclass

from fairlead_worker.parsing.pattern import match
from fairlead_worker.parsing.stage import EventSink, Stage


@dataclass(slots=True)
class BetweenCalls:
    """Closing markup is consumed; what cannot be some goes back to be text."""

    tail: str
    """Pattern with the groups `more`, where another call begins, or `close`, behind the last. Empty: calls need no closing."""
    next_call: Callable[[], Stage]
    """What reads another call, from the beginning of `more` on."""
    next_stage: Stage
    is_reasoning = False

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        found = match(self.tail, text, partial=True) if self.tail else None
        if found is None:
            return text, self.next_stage
        if found.partial:
            return ("" if final else text), self
        if found.groupdict().get("more"):
            return text[found.start("more") :], self.next_call()
        return text[found.end() :], self.next_stage
