"""Duration of each start-up phase, for the log, `GET /ready` and metrics. It shows which phase to shorten."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class StartUp:
    """Phases in the order in which they came. Times of a repeated phase are added up."""

    began: float
    """Monotonic time, like all times here."""
    seconds: dict[str, float] = field(default_factory=dict)
    _phase: str = "start"
    _since: float = field(init=False)
    """When the phase began."""

    def __post_init__(self) -> None:
        self._since = self.began

    def enter(self, phase: str, now: float) -> None:
        """Begin `phase` and end the previous one."""
        if phase == self._phase:
            return
        self._close(now)
        self._phase = phase

    def finish(self, now: float) -> str:
        """End the last phase. Return a summary for the log."""
        self._close(now)
        self._phase = ""
        parts = ", ".join(f"{phase} {spent:.1f}" for phase, spent in self.seconds.items() if spent >= 0.05)
        return f"{now - self.began:.1f} s from its start: {parts}"

    def join(self, now: float) -> None:
        """Record when the index listed the worker. It is a separate entry, because requests are served meanwhile."""
        self.seconds["join"] = now - self._since

    def _close(self, now: float) -> None:
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._since = now
