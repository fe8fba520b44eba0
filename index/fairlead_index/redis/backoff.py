"""Backoff between attempts to reach a Redis that fails, and a limit of what is logged about it."""

import time
from collections.abc import Callable
from typing import Final

PATIENCE_SECONDS: Final = 0.2
LOG_SECONDS: Final = 60.0


class Backoff:
    """A delay that doubles from `first` to `longest` seconds with each failure in a row.

    When the delay is over, `may_try` admits one caller. The other callers wait for its outcome.
    A late reply (`record_timeout`) counts as a failure only after PATIENCE_SECONDS without a reply in time: the next one may be in time.
    """

    def __init__(self, first: float = 0.1, longest: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._longest, self._clock = first, longest, clock
        self._delay = 0.0
        self._until = 0.0
        self._increased_at = float("-inf")
        self._timeouts_since = float("inf")
        self.reason = ""

    def may_try(self) -> bool:
        """Return whether this caller should try now. Costs well under a microsecond."""
        if not self._delay:
            return True
        now = self._clock()
        if now < self._until:
            return False
        self._until = now + self._delay  # this caller tries; the next one waits for its outcome
        return True

    @property
    def is_active(self) -> bool:
        """Whether callers are held back."""
        return self._delay > 0

    def record_timeout(self, reason: str) -> None:
        """Record a reply that did not come in time."""
        self._timeouts_since = min(self._timeouts_since, self._clock())
        if self.is_active or self._clock() - self._timeouts_since >= PATIENCE_SECONDS:
            self.record_failure(reason)

    def record_failure(self, reason: str) -> float:
        """Record a failure. Return the delay in seconds."""
        now = self._clock()
        if now - self._increased_at >= self._delay:  # of many calls in flight only the first increases the delay
            self._delay = min(self._longest, self._delay * 2 or self._first)
            self._increased_at = now
        self._until = now + self._delay
        self.reason = reason
        return self._delay

    def reset(self) -> None:
        """End the backoff after a success."""
        self._delay = 0.0
        self._increased_at = float("-inf")
        self._timeouts_since = float("inf")
        self.reason = ""


class LogLimit:
    """At most one log line per LOG_SECONDS, for what a hostile Redis can repeat at will."""

    def __init__(self) -> None:
        self._until = float("-inf")

    def may_log(self) -> bool:
        """Return whether a line may be logged now."""
        now = time.monotonic()
        if now < self._until:
            return False
        self._until = now + LOG_SECONDS
        return True
