"""Pace of prefill, measured from answers. Pure: the caller gives the time."""

from math import exp

WINDOW_SECONDS = 30.0
"""Busy time after which a measurement counts 1/e."""


class PrefillPace:
    """Prompt tokens per second of the time in which streamed requests wait for their first token.

    The engine prefills nearly all of that time, whatever the number of requests, so concurrent requests do not count twice.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._since = 0.0
        self._seconds = self._tokens = 0.0

    def begin(self, now: float) -> None:
        """Record that a request was sent."""
        if not self._waiting:
            self._since = now
        self._waiting += 1

    def end(self, now: float, tokens: int) -> None:
        """Record a request's first token, or its end without one. `tokens`: prompt tokens that it computed; 0: unknown."""
        spent, self._since = now - self._since, now
        self._waiting -= 1
        kept = exp(-spent / WINDOW_SECONDS)
        self._seconds, self._tokens = self._seconds * kept + spent, self._tokens * kept + tokens

    @property
    def tokens_per_second(self) -> float:
        """The pace; 0 while it is unknown."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
