"""Progress of a load that sends no reports: what the engine's processes have read, written and computed, from /proc.

A layer of a large model may take minutes to arrive from a slow volume, and a compiler reports nothing while it works. Neither is stuck. A
download that waits for a silent server neither reads nor computes.
"""

from dataclasses import dataclass
from pathlib import Path

from fairlead_worker.api.engine.client import EngineState

MIN_BYTES = 1 << 20
"""Bytes read or written since the last progress that count as progress: more than logging and messages make."""
MIN_CPU = 1.0
"""Seconds of CPU time since the last progress that count as progress."""
SILENT_WORK_SECONDS = 1800.0
"""Seconds after the last report during which work counts as progress. Two threads that wait for each other in a loop would look busy
forever."""
COMPUTING_STAGES = ("Starting", "Loading", "Preparing")
"""Stages in which CPU time counts as progress. A download that retries also uses CPU time."""
TICKS_PER_SECOND = 100.0
"""USER_HZ of /proc, the same on every Linux that Python runs on."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a process and its children have done since their start."""

    bytes: int = 0
    cpu_seconds: float = 0.0

    @classmethod
    def measure(cls, session: int) -> "Work":
        """Measure all processes of a session. Omit processes that end meanwhile."""
        moved, ticks = 0, 0
        for path in Path("/proc").glob("[0-9]*"):
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) != session:
                    continue
                ticks += sum(int(each) for each in fields[11:15])
                counts = dict(line.split(": ") for line in (path / "io").read_text().splitlines())
                moved += int(counts["rchar"]) + int(counts["wchar"]) + int(counts["read_bytes"])
            except (OSError, ValueError, KeyError, IndexError):
                continue
        return cls(moved, ticks / TICKS_PER_SECOND)


class LoadWatch:
    """Measures the work of one loading engine and updates `state.last_progress_at`."""

    def __init__(self, state: EngineState, session: int) -> None:
        self._state, self._session = state, session
        self._counted = Work()
        self._reported = state.last_progress_at
        self._moved = state.last_progress_at
        """The value that this class last wrote to `last_progress_at`. Any other value there comes from a report."""

    def check(self, now: float) -> None:
        state = self._state
        if state.last_progress_at != self._moved:
            self._reported = self._moved = state.last_progress_at
        if now - self._reported > SILENT_WORK_SECONDS:
            return
        work = Work.measure(self._session)
        computed = state.stage in COMPUTING_STAGES and work.cpu_seconds - self._counted.cpu_seconds >= MIN_CPU
        if computed or abs(work.bytes - self._counted.bytes) >= MIN_BYTES:
            self._counted = work
            state.last_progress_at = self._moved = now


def describe_stuck_load(state: EngineState, seconds: float) -> str:
    """Return the reason of a stuck load for people: the step, how far it was, and where to look."""
    amount = f" ({state.done / 2**30:.1f} of {state.total / 2**30:.1f} GiB)" if state.total else ""
    where = {
        "Downloading": "the source has stopped sending: see spec.model.uri, and the network policies of the namespace",
        "Waiting": "the worker that downloads the model into this cache has stopped: see its log",
        "Loading": "the volume with the weights has stopped answering: see spec.model.uri and spec.model.cache",
    }.get(state.stage, "see the worker's log; --limits load_timeout gives it longer")
    return f"the load has made no progress for {seconds:.0f} s in {state.step}, {state.percent} %{amount}: {where}"
