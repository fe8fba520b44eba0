"""Time of a decode step, measured from the engine's times between tokens. Pure: the caller gives the time."""

from collections import deque
from typing import Final

MIN_GAPS: Final = 8
"""Times between tokens of one measurement."""
RECENT_SECONDS: Final = 10.0
"""Age up to which a measurement counts."""


class StepTime:
    """The lowest of the recent means of the times between tokens: the closest to a step without prefill.

    Tokens that wait for another prompt's prefill take as long as that prefill, which the backlog counts already. Counted twice, it made
    conversations leave the engine that held their blocks: a mean of 0.25 s costs as much in the score as 1.25 s of prefill.
    """

    def __init__(self) -> None:
        self._seconds, self._gaps = 0.0, 0
        self._means: deque[tuple[float, float]] = deque()
        """When each measurement ended, and its mean."""

    def record(self, now: float, seconds: float, gaps: int) -> None:
        """Record the times between tokens since the last call: their sum and their number."""
        self._seconds += seconds
        self._gaps += gaps
        if self._gaps >= MIN_GAPS and self._seconds > 0:
            self._means.append((now, self._seconds / self._gaps))
            self._seconds, self._gaps = 0.0, 0

    def pause(self) -> None:
        """Record that the engine is idle: an unfinished measurement is dropped."""
        self._seconds, self._gaps = 0.0, 0

    def seconds(self, now: float) -> float:
        """Return the time of a step; 0: unknown. The newest measurement counts until the next."""
        while len(self._means) > 1 and self._means[0][0] < now - RECENT_SECONDS:
            self._means.popleft()
        return min((mean for _, mean in self._means), default=0.0)
