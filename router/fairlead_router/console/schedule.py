"""The picture of a pod's last steps, from the trace that its worker writes with `--trace-schedule`."""

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from fairlead_common.schedule.svg import draw_svg
from fairlead_common.schedule.trace import NotATrace, Trace, parse
from fairlead_common.truncate import truncate
from fairlead_router.console.fleet import name_of
from fairlead_router.fleet.workers import Worker
from fairlead_router.wire.upstream import Head, UpstreamError

PATH: Final = "/internal/schedule"
SECONDS: Final = 2.0
MAX_BYTES: Final = 256 << 10
"""Of a worker's answer, which has at most 132 KiB."""
MAX_STEPS: Final = 200
MAX_ROWS: Final = 2000
"""Of the picture: one row takes 250 bytes of SVG at most."""


def find_pod(path: str, workers: Iterable[Worker]) -> Worker | None:
    """Return the worker of `/ui/pods/NAME/schedule`; None for another path or an unknown name."""
    if not (path.startswith("/ui/pods/") and path.endswith("/schedule")):
        return None
    name = path.removeprefix("/ui/pods/").removesuffix("/schedule")
    return next((worker for worker in workers if name_of(worker) == name), None)


async def draw_schedule(worker: Worker) -> tuple[str, str]:
    """Return the SVG of the worker's last steps, and if it is empty, why there is none."""
    try:
        head, body = await worker.admin.fetch(PATH, SECONDS, wants_body=_is_small)
    except TimeoutError:
        return "", f"the pod did not answer within {SECONDS:g} s"
    except UpstreamError as error:
        return "", f"the pod did not answer: {error}"
    if head.status != 200:
        return "", _reason(head, body)
    return await asyncio.to_thread(_draw, body)


def _is_small(head: Head) -> bool:
    length = head.get(b"content-length") or b""
    return length.isdigit() and int(length) <= MAX_BYTES


def _draw(body: bytes) -> tuple[str, str]:
    try:
        trace = parse(body.splitlines())
    except NotATrace as error:
        return "", f"its answer is {error}"
    first, rows = len(trace.steps), 0
    while first and len(trace.steps) - first < MAX_STEPS and (not rows or rows + len(trace.steps[first - 1].rows) <= MAX_ROWS):
        first -= 1
        rows += len(trace.steps[first].rows)
    if first == len(trace.steps):
        return "", "it has run no step yet, or none was written to the file: it is flushed every second"
    return draw_svg(Trace(trace.about, trace.steps[first:])), ""


def _reason(head: Head, body: bytes) -> str:
    """Return the message of a worker's error, or its status."""
    try:
        return truncate(str(msgspec.json.decode(body)["error"]["message"]), 300)
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"it answered {head.status}"
