"""Scale-up status reported by the operator, which error answers quote when no worker became ready in time."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

FRESH_SECONDS = 90.0
"""Lifetime of the operator's report: longer than its longest poll."""
RETRY_FIRST, RETRY_LONGEST = 5, 120
"""Bounds of Retry-After, seconds. Between them it is the time that the start has taken so far, the best guess of the rest."""
_REASON = re.compile(r"[A-Za-z]{1,64}")


@dataclass(frozen=True, slots=True)
class _Report:
    wanted: int
    starting: int
    reason: str
    started_at: float
    received_at: float
    advancing: bool


class ScaleUpStatus:
    """Latest report of the operator's polls. It holds numbers and one word only: an admin port asks for no key, and clients see them."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._report: _Report | None = None

    def update(self, wanted: int, starting: int, seconds: float, reason: str, advancing: bool = False) -> None:
        """Store a report: `starting` of `wanted` workers are not ready, the first of them for `seconds`.

        `reason`: why, in one word such as Loading. `advancing`: the operator sees nothing that keeps them from becoming ready.
        """
        now = self._clock()
        kept = reason if _REASON.fullmatch(reason) else ""
        wanted, starting = max(0, min(1000, wanted)), max(0, min(1000, starting))
        self._report = _Report(wanted, starting, kept, now - max(0.0, min(86400.0, seconds)), now, advancing)

    @property
    def is_advancing(self) -> bool:
        """Whether workers are starting and no known problem blocks them, so that waiting is worthwhile."""
        report = self._current
        return report is not None and report.advancing and report.starting > 0

    @property
    def description(self) -> str:
        """Text that follows "No worker became ready"; empty without a recent report."""
        report = self._current
        if report is None:
            return ""
        if not report.wanted:
            return ": the service is scaled to zero, and the operator knows of the request"
        if not report.starting:
            return ""
        reason = f", {report.reason}" if report.reason else ""
        return f": {report.starting} of {report.wanted} workers being started, for {self._clock() - report.started_at:.0f} s now{reason}"

    @property
    def retry_after(self) -> int:
        """Retry-After, seconds."""
        report = self._current
        if report is None or not report.starting:
            return RETRY_FIRST
        return round(max(RETRY_FIRST, min(RETRY_LONGEST, self._clock() - report.started_at)))

    @property
    def _current(self) -> _Report | None:
        return self._report if self._report is not None and self._clock() - self._report.received_at < FRESH_SECONDS else None
