"""After a call: another one, the end of the calls, or whatever else comes."""

from collections.abc import Callable
from dataclasses import dataclass

from fairlead_worker.parsing.pattern import match
from fairlead_worker.parsing.stage import Out, Stage


@dataclass(slots=True)
class Gap:
    """Closing markup is consumed; what cannot be some goes back to be text."""

    tail: str
    """Pattern with the groups `more`, where another call begins, or `close`, behind the last. Empty: calls need no closing."""
    again: Callable[[], Stage]
    """What reads another call, from the beginning of `more` on."""
    back: Stage
    thinks = False

    def take(self, text: str, final: bool, out: Out) -> tuple[str, Stage]:
        found = match(self.tail, text, partial=True) if self.tail else None
        if found is None:
            return text, self.back
        if found.partial:
            return ("" if final else text), self
        if found.groupdict().get("more"):
            return text[found.start("more") :], self.again()
        return text[found.end() :], self.back
