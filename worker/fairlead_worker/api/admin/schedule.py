"""`/internal/schedule`: the end of the file of `--trace-schedule`, for the router's web console."""

import asyncio
from pathlib import Path
from typing import Final

from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.worker import Worker

MAX_BYTES: Final = 128 << 10
"""Of the steps: a thousand steps of a few requests, or tens of steps of 256 requests."""
_MAX_FIRST_LINE: Final = 4096


async def schedule(worker: Worker, context: RequestContext) -> None:
    """Return the first line of the trace and its last whole lines. They have no tokens, texts or client ids."""
    name = worker.config.trace_schedule
    if not name:
        raise ApiError(404, "this worker writes no trace of its steps: start it with --trace-schedule FILE")
    try:
        data = await asyncio.to_thread(read_end, Path(name))
    except OSError as error:
        raise ApiError(404, f"--trace-schedule {name} cannot be read: {error.strerror}") from None
    await context.respond(200, data, type="text/plain; charset=utf-8")


def read_end(path: Path) -> bytes:
    """Return the first line and the last whole lines, these with at most MAX_BYTES. Raises OSError."""
    if not path.is_file():  # reading a pipe would take the lines from its reader
        raise OSError(0, "not a regular file")
    with path.open("rb") as file:
        first = file.readline(_MAX_FIRST_LINE)
        begin = max(file.tell(), file.seek(0, 2) - MAX_BYTES)
        file.seek(begin)
        lines = file.read(MAX_BYTES)
    if begin > len(first):
        lines = lines[lines.find(b"\n") + 1 :]
    return first + lines[: lines.rfind(b"\n") + 1]
