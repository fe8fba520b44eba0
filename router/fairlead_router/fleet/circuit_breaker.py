"""A breaker for each worker: after failures in a row it is left alone for a while, longer each time."""

from collections.abc import Callable

FAILURES_TO_OPEN = 3
OPEN_SECONDS = (1.0, 10.0)


class CircuitBreaker:
    """Closed: requests may go. Opened by failures in a row; after its time, a good look (`probed`) or a good answer closes it again."""

    def __init__(self, clock: Callable[[], float], on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change`: called when it has opened or closed."""
        self._clock, self._on_change = clock, on_change
        self._failures = 0
        self._openings = 0
        self._open_until: float | None = None

    @property
    def is_closed(self) -> bool:
        return self._open_until is None

    def record_failure(self) -> None:
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN and self._open_until is None:
            shortest, longest = OPEN_SECONDS
            self._open_until = self._clock() + min(longest, shortest * 2**self._openings)
            self._openings += 1
            self._on_change()

    def record_success(self) -> None:
        self._failures = self._openings = 0
        if self._open_until is not None:
            self._open_until = None
            self._on_change()

    def record_healthy_check(self) -> None:
        """A look found the worker well: half open once its time is over, so that one more failure opens it again."""
        if self._open_until is not None and self._clock() >= self._open_until:
            self._open_until = None
            self._failures = FAILURES_TO_OPEN - 1
            self._on_change()
