"""A schedule as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" of the Chromium project: complete events (`X`) with microseconds, counters (`C`) and names (`M`).
"""

import json
from collections.abc import Iterator
from typing import Any

from fairlead_common.schedule.trace import Row, Step, Trace

_STEPS, _REQUESTS = 1, 2
"""Process ids: one track with the engine's steps, and one process with a track for each request."""


def draw_trace(trace: Trace) -> str:
    """Return the document. Unlike the picture it has the idle time between steps."""
    about = {name: value for name, value in trace.about.items() if name != "format"}
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(_events(trace))}, separators=(",", ":")) + "\n"


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    lanes = {name: lane for lane, name in enumerate(trace.requests, 1)}
    yield _name("process_name", _STEPS, 0, "engine")
    yield _name("thread_name", _STEPS, 1, "steps")
    yield _name("process_name", _REQUESTS, 0, "requests")
    for name, lane in lanes.items():
        yield _name("thread_name", _REQUESTS, lane, name)
    for step in trace.steps:
        at, duration = 1e6 * (step.at - step.seconds), 1e6 * step.seconds
        times = {"ph": "X", "ts": round(at, 1), "dur": round(duration, 1)}
        yield {**times, "pid": _STEPS, "tid": 1, "name": _kind(step), "args": _totals(step) | {"step": step.number}}
        yield {"ph": "C", "ts": times["ts"], "pid": _STEPS, "name": "tokens", "args": _totals(step)}
        for row in step.rows:
            yield {
                **times,
                "pid": _REQUESTS,
                "tid": lanes[row.request],
                "name": "decode" if row.decode else "prefill",
                "args": _row(step, row),
            }


def _kind(step: Step) -> str:
    return "mixed" if step.decodes and step.prefill_tokens else "prefill" if step.prefill_tokens else "decode"


def _totals(step: Step) -> dict[str, int]:
    return {"prefill_tokens": step.prefill_tokens, "decodes": step.decodes}


def _row(step: Step, row: Row) -> dict[str, Any]:
    made = {"step": step.number, "start": row.start, "tokens": row.count, "samples": row.samples}
    return made | ({"draft_tokens": row.drafted, "accepted": row.accepted} if row.drafted else {})


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
