"""Progress of a load that sends no reports: what the engine's processes have read, written and computed.

A layer of a large model may take minutes to arrive from a slow volume, and a compiler reports nothing while it works. Neither is stuck. A
download that waits for a silent server neither reads nor computes.
"""

from fairlead_worker.api.engine.client import EngineState
from fairlead_worker.platform.processes import Work

SILENT_WORK_SECONDS = 1800.0
"""Seconds after the last report during which work counts as progress. Two threads that wait for each other in a loop would look busy
forever."""
COMPUTING_STAGES = ("Starting", "Loading", "Preparing")
"""Stages in which CPU time counts as progress. A download that retries also uses CPU time."""


class LoadWatch:
    """Measures the work of one loading engine and updates `state.last_progress_at`."""

    def __init__(self, state: EngineState, session: int) -> None:
        self._state, self._session = state, session
        self._counted = Work()
        self._reported = state.last_progress_at
        self._written = state.last_progress_at
        """The value that this class last wrote to `last_progress_at`. Any other value there comes from a report."""

    def check(self, now: float) -> None:
        """Measure the work since the last check, and count it as progress until `SILENT_WORK_SECONDS` after the last report."""
        state = self._state
        if state.last_progress_at != self._written:
            self._reported = self._written = state.last_progress_at
        if now - self._reported > SILENT_WORK_SECONDS:
            return
        work = Work.measure(self._session)
        computed = state.stage in COMPUTING_STAGES and work.computed_since(self._counted)
        if computed or work.moved_bytes_since(self._counted):
            self._counted = work
            state.last_progress_at = self._written = now


def describe_stuck_load(state: EngineState, seconds: float) -> str:
    """Return the reason of a stuck load for people: the step, how far it was, and where to look."""
    amount = f" ({state.done / 2**30:.1f} of {state.total / 2**30:.1f} GiB)" if state.total else ""
    where = {
        "Downloading": "the source has stopped sending: see spec.model.uri, and the network policies of the namespace",
        "Waiting": "the worker that downloads the model into this cache has stopped: see its log",
        "Loading": "the volume with the weights has stopped answering: see spec.model.uri and spec.model.cache",
    }.get(state.stage, "see the worker's log; --limits load_timeout gives it longer")
    return f"the load has made no progress for {seconds:.0f} s in {state.step}, {state.percent} %{amount}: {where}"
