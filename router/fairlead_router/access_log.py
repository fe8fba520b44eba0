"""Access log: one line for each request, written in batches.

A `logging` call and a write for each line cost 20 microseconds a request.
"""

import asyncio
import logging
import time
from typing import TextIO

from fairlead_common.telemetry.logs import json_line

NAME = "fairlead_router.access"
FLUSH_SECONDS = 0.1
FLUSH_LINES = 512


def write_bare_lines(name: str, stream: TextIO) -> None:
    """Send the logger's records to `stream` without any prefix, and to no other handler."""
    logger, handler = logging.getLogger(name), logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


class AccessLog:
    """Buffer of log lines that are flushed as one record every `FLUSH_SECONDS`.

    Each line carries its own prefix, so the logger needs a handler that adds none (`write_bare_lines`).
    """

    def __init__(self, logger: logging.Logger, json: bool = False) -> None:
        self._logger, self._json = logger, json
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second, self._stamp = 0, ""

    @property
    def is_enabled(self) -> bool:
        return self._logger.isEnabledFor(logging.INFO)

    def write(self, line: str, request_id: str = "", trace_id: str = "") -> None:
        """Append a line. JSON lines carry the ids as fields. Call this on a running loop."""
        now = time.time()
        if self._json:
            self._lines.append(json_line(now, "INFO", self._logger.name, line, request_id, trace_id))
        else:
            if int(now) != self._second:
                self._second = int(now)
                self._stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            self._lines.append(f"{self._stamp},{int(now * 1000) % 1000:03d} INFO {self._logger.name} {line}")
        if len(self._lines) >= FLUSH_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Write the buffered lines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if lines:
            self._logger.info("%s", "\n".join(lines))
