"""The rate at which requests arrive, from their times. Pure: the caller gives the time."""

from math import exp

WINDOW_SECONDS = 10.0
"""Time after which an arrival counts 1/e."""
SHORTEST_SECONDS = 1.0
"""Shortest time over which the first arrivals are averaged."""


class ArrivalRate:
    """Requests per second of about the last WINDOW_SECONDS, or since the first one: a sum of arrivals that decays exponentially."""

    __slots__ = ("_at", "_began", "_count")

    def __init__(self) -> None:
        self._count = self._at = 0.0
        self._began: float | None = None

    def record(self, now: float) -> None:
        """Count an arrival."""
        if self._began is None:
            self._began = now
        self._count, self._at = self._decayed(now) + 1.0, now

    def per_second(self, now: float) -> float:
        if self._began is None:
            return 0.0
        covered = 1.0 - exp(-max(SHORTEST_SECONDS, now - self._began) / WINDOW_SECONDS)
        return self._decayed(now) / (WINDOW_SECONDS * covered)

    def _decayed(self, now: float) -> float:
        return self._count * exp(min(0.0, self._at - now) / WINDOW_SECONDS)
