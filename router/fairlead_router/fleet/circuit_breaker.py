"""Circuit breaker of one worker: consecutive failures exclude it for a time, longer each time."""

from collections.abc import Callable

FAILURES_TO_OPEN = 3
OPEN_SECONDS = (1.0, 10.0)


class CircuitBreaker:
    """Circuit breaker. Consecutive failures open it; after its timeout, a healthy check or a good answer closes it."""

    def __init__(self, clock: Callable[[], float], on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change`: called when the breaker opens or closes."""
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
        """Record a healthy check. It half-opens the breaker after the timeout, so that one more failure opens it again."""
        if self._open_until is not None and self._clock() >= self._open_until:
            self._open_until = None
            self._failures = FAILURES_TO_OPEN - 1
            self._on_change()
