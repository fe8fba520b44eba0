"""How long to leave a Redis alone that did not answer."""

import time
from collections.abc import Callable


class Pause:
    """Grows from `first` to `longest` seconds with each failure in a row. When it is over, one caller may try; the others still wait.

    A late answer (`missed`) is a failure only when none has come for `patience` seconds: the next may well be in time.
    """

    def __init__(
        self, first: float = 0.1, longest: float = 2.0, clock: Callable[[], float] = time.monotonic, patience: float = 0.2
    ) -> None:
        self._first, self._longest, self._clock, self._patience = first, longest, clock, patience
        self._length = 0.0
        self._until = 0.0
        self._lengthened = float("-inf")
        self._missing_since = float("inf")
        self.reason = ""

    def may_try(self) -> bool:
        """Whether this caller should try now. Costs well under a microsecond."""
        if not self._length:
            return True
        now = self._clock()
        if now < self._until:
            return False
        self._until = now + self._length  # this caller tries; the next one waits for its outcome
        return True

    @property
    def on(self) -> bool:
        """Whether there is a pause."""
        return self._length > 0

    def missed(self, reason: str) -> None:
        """Notes an answer that did not come in time."""
        self._missing_since = min(self._missing_since, self._clock())
        if self.on or self._clock() - self._missing_since >= self._patience:
            self.failed(reason)

    def failed(self, reason: str) -> float:
        """Notes a failure; returns the seconds to wait."""
        now = self._clock()
        if now - self._lengthened >= self._length:  # of many calls in flight only the first lengthens the pause
            self._length = min(self._longest, self._length * 2 or self._first)
            self._lengthened = now
        self._until = now + self._length
        self.reason = reason
        return self._length

    def succeeded(self) -> None:
        self._length = 0.0
        self._lengthened = float("-inf")
        self._missing_since = float("inf")
        self.reason = ""
