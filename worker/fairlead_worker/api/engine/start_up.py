"""How long each phase of a worker's start took: for its log, `GET /ready` and metrics. Whoever waits for pods sees what to shorten."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class StartUp:
    """Phases in the order in which they came; time in one that comes back is added up."""

    began: float
    """Monotonic time, as all others here."""
    seconds: dict[str, float] = field(default_factory=dict)
    _phase: str = "start"
    _since: float = -1.0

    def enter(self, phase: str, now: float) -> None:
        """`phase` begins, and the one before it is over."""
        if phase == self._phase:
            return
        self._close(now)
        self._phase = phase

    def finish(self, now: float) -> str:
        """The last phase is over; what a log says."""
        self._close(now)
        self._phase = ""
        parts = ", ".join(f"{phase} {spent:.1f}" for phase, spent in self.seconds.items() if spent >= 0.05)
        return f"{now - self.began:.1f} s from its start: {parts}"

    def join(self, now: float) -> None:
        """The index names the worker; told apart, as requests are served meanwhile."""
        self.seconds["join"] = now - (self._since if self._since >= 0 else self.began)

    def _close(self, now: float) -> None:
        if self._phase:
            begin = self._since if self._since >= 0 else self.began
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - begin
        self._since = now
