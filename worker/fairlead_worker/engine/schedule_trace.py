"""`--trace-schedule FILE`: each step's plan as one line of JSON, for `fairlead schedule FILE`. It has no tokens, texts or client ids."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fairlead_worker.scheduler.plan import StepPlan

FORMAT = "fairlead-schedule-1"
FLUSH_SECONDS = 1.0
"""Longest part of a trace that a killed worker loses."""

logger = logging.getLogger(__name__)


class ScheduleTrace:
    """Writes `{"format", "page_size", …}`, then each step as `{"step", "at", "seconds", "rows": [[request, start, count, samples], …]}`.

    `at`: seconds from the start of the trace to the end of the step. `start`: tokens of the request that were computed before.
    """

    def __init__(self, path: Path, about: dict[str, object], clock: Callable[[], float] = time.monotonic) -> None:
        """Open the trace, and replace an existing file. Raises OSError if the file cannot be written."""
        self._file = path.open("wb", buffering=1 << 16)
        self._path = path
        self._clock = clock
        self._began = self._flushed = clock()
        self._steps = 0
        self._encoder = msgspec.json.Encoder()
        self._write({"format": FORMAT, **about}, flush=True)

    def step(self, plan: StepPlan, seconds: float) -> None:
        """Write one finished step. It never fails: a full disk ends the trace and not the engine."""
        if self._file.closed:
            return
        now = self._clock()
        line: dict[str, object] = {}
        if plan:
            rows = [(row.request.id, row.start, row.count, row.samples) for row in plan.rows]
            line = {"step": self._steps, "at": round(now - self._began, 6), "seconds": round(seconds, 6), "rows": rows}
            self._steps += 1
        if is_due := now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
        self._write(line, is_due)

    def close(self) -> None:
        """Write the rest and close the file."""
        try:
            self._file.close()
        except OSError as error:
            logger.warning("--trace-schedule %s: %s; its end is missing", self._path, error)

    def _write(self, line: dict[str, object], flush: bool) -> None:
        try:
            if line:
                self._file.write(self._encoder.encode(line) + b"\n")
            if flush:
                self._file.flush()
        except OSError as error:
            logger.warning("--trace-schedule %s: %s; no more of it is written", self._path, error)
            self.close()
