"""Time of a decode step, measured from the engine's times between tokens. No I/O, no clock."""

from collections import deque
from typing import Final

MIN_GAPS: Final = 32
"""Times between tokens of one measurement."""
MEASUREMENTS: Final = 16
"""Newest measurements that count."""


class StepTime:
    """Seconds of a decode step without prefill: the lowest of the recent means of the times between tokens.

    Tokens that wait for another prompt's prefill take as long as that prefill, which the backlog counts already. Counted twice, it made
    conversations leave the engine that held their blocks: a mean of 0.25 s costs as much in the score as 1.25 s of prefill.
    """

    def __init__(self) -> None:
        self._seconds, self._gaps = 0.0, 0
        self._means: deque[float] = deque(maxlen=MEASUREMENTS)

    def record(self, seconds: float, gaps: int) -> None:
        """Record new times between tokens: their sum and their number."""
        self._seconds += seconds
        self._gaps += gaps
        if self._gaps >= MIN_GAPS:
            self._means.append(self._seconds / self._gaps)
            self._seconds, self._gaps = 0.0, 0

    @property
    def seconds(self) -> float:
        """The time of a step; 0: unknown."""
        return min(self._means, default=0.0)
