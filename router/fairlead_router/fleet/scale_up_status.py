"""What the operator said of workers that are being started: so that who waited in vain is told how far they are."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

FRESH_SECONDS = 90.0
"""How long a word of the operator counts: longer than its longest poll."""
RETRY_FIRST, RETRY_LONGEST = 5, 120
"""Seconds. In between: as long again as it has taken so far, which is the best guess where nothing is known of a start's length."""
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
    """`told` by the operator's polls. Numbers and one word only: anybody who reaches the router may say them, and clients read them."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._report: _Report | None = None

    def update(self, wanted: int, starting: int, seconds: float, reason: str, advancing: bool = False) -> None:
        """`starting` of `wanted` workers are not ready, the first of them for `seconds`; `reason`: why, in one word such as Loading.
        `advancing`: nothing that the operator sees keeps them from becoming ready."""
        now = self._clock()
        kept = reason if _REASON.fullmatch(reason) else ""
        wanted, starting = max(0, min(1000, wanted)), max(0, min(1000, starting))
        self._report = _Report(wanted, starting, kept, now - max(0.0, min(86400.0, seconds)), now, advancing)

    @property
    def is_advancing(self) -> bool:
        """Workers are on their way, and nothing is known to hold them up: it is worth waiting for them."""
        said = self._current
        return said is not None and said.advancing and said.starting > 0

    @property
    def description(self) -> str:
        """Behind "No worker became ready"; empty where the operator has said nothing lately."""
        said = self._current
        if said is None:
            return ""
        if not said.wanted:
            return ": the service is scaled to zero, and the operator knows of the request"
        if not said.starting:
            return ""
        why = f", {said.reason}" if said.reason else ""
        return f": {said.starting} of {said.wanted} workers being started, for {self._clock() - said.started_at:.0f} s now{why}"

    @property
    def retry_after(self) -> int:
        """Seconds."""
        said = self._current
        if said is None or not said.starting:
            return RETRY_FIRST
        return round(max(RETRY_FIRST, min(RETRY_LONGEST, self._clock() - said.started_at)))

    @property
    def _current(self) -> _Report | None:
        return self._report if self._report is not None and self._clock() - self._report.received_at < FRESH_SECONDS else None
