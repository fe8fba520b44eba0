"""Request timing: when each request was admitted and had its first token, and how long prefill stalls the decodes beside it.

It reads the host's clock only. It reads the rows of steps with prefill, and the outputs that are not a plain decode token. So a step
without prefill costs a few look-ups.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from fairlead_index.hashing import token_bytes
from fairlead_worker.engine.schedule_trace import ScheduleTrace
from fairlead_worker.ipc.messages import CacheEvent, Chunk, Decoded, Load, Output, Step, Submit, Timing
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.request import Request
from fairlead_worker.scheduler.step_outputs import StepOutputs

MAX_CHUNKS = 64
"""Chunks of a traced prompt that are reported separately."""
_KEEP = 0.9
"""Weight of the past in the time of a step that only decodes."""


@dataclass(slots=True)
class _Times:
    """The times of one request, in monotonic seconds."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0
    request: Request | None = None
    """None until the request is admitted."""
    awaits_token: bool = False
    """No token since the latest admission."""
    chunks: list[Chunk] | None = None
    """Prefill since the latest admission; None: the request is not traced."""
    reported_preemptions: int = -1
    """Preemptions that were reported to the API; -1 before the first token."""


class RequestTimer:
    """Records the times of requests and steps.

    Call `record_arrival` for each message. For each step, call `record_plan`, `record_step` and `report`.
    """

    def __init__(self, trace: ScheduleTrace | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace = trace
        self._clock = clock
        self._times: dict[str, _Times] = {}
        self._traced = 0
        """How many of them are traced."""
        self._decode_seconds = 0.0
        """Recent seconds of a step that only decodes; 0 before the first."""

    def record_arrival(self, message: Submit) -> None:
        """Store when a request arrived."""
        if message.id not in self._times:
            self._times[message.id] = _Times(message.received_at or self._clock(), chunks=[] if message.traced else None)
            self._traced += message.traced

    def record_plan(self, plan: StepPlan) -> None:
        """Store when the requests of a plan were admitted. Call it before the step runs."""
        if not plan.prefill_tokens:
            return
        now = self._clock()
        for row in plan.rows:
            times = self._times.get(row.request.id)
            if times is None:
                continue
            if times.request is None:
                times.admitted, times.request, times.awaits_token = now, row.request, True
            elif times.reported_preemptions < row.request.history.preemptions:
                times.awaits_token = True

    def record_step(self, plan: StepPlan, result: StepResult) -> None:
        """Write the step to the schedule trace, and store chunks of traced requests."""
        if self._traced and plan.prefill_tokens:
            self._record_chunks(plan, result.seconds)
        if self._trace is not None:
            self._trace.step(plan if result.executed is None else result.executed, result.seconds)

    def report(self, plan: StepPlan, result: StepResult, outputs: StepOutputs, events: tuple[CacheEvent, ...], load: Load) -> Step:
        """Return the `Step` message: the outputs, the first ones after an admission with their timing, and the times of the step."""
        decoded = Decoded(tuple([request.id for request in outputs.decoded]), token_bytes(outputs.tokens))
        stall = self._stall(plan, result.seconds)
        stalled = plan.decodes + plan.excluded_decodes if stall else 0
        full = tuple([self._finish_output(output) for output in outputs.full])
        return Step(full, decoded, events, load, result.seconds, plan.prefill_tokens, plan.decodes, stall, stalled)

    def close(self) -> None:
        """Close the schedule trace."""
        if self._trace is not None:
            self._trace.close()

    def _finish_output(self, output: Output) -> Output:
        """Add the timing to the first output after an admission, and forget a request that ended."""
        times = self._times.get(output.id)
        if times is not None and times.awaits_token and (output.tokens or output.embedding):
            times.awaits_token = False
            output = self._add_timing(output, times)
        if times is not None and output.finish is not None:
            del self._times[output.id]
            self._traced -= times.chunks is not None
        return output

    def _record_chunks(self, plan: StepPlan, seconds: float) -> None:
        started = self._clock() - seconds
        for row in plan.rows:
            times = self._times.get(row.request.id)
            if times is None or times.chunks is None or not times.awaits_token:
                continue
            chunks = times.chunks
            if len(chunks) < MAX_CHUNKS:
                chunks.append(Chunk(started, seconds, row.start, row.count))
            else:  # the last one covers all further steps
                last = chunks[-1]
                chunks[-1] = Chunk(last.started, started + seconds - last.started, last.start, last.tokens + row.count)

    def _add_timing(self, output: Output, times: _Times) -> Output:
        assert times.request is not None, "a request with a token was admitted"
        if times.reported_preemptions < 0:
            times.first_token = self._clock()
        history, chunks = times.request.history, times.chunks or ()
        times.reported_preemptions, times.chunks = history.preemptions, None if times.chunks is None else []
        timing = Timing(
            times.admitted - times.arrived,
            times.first_token - times.admitted,
            history.preemptions,
            history.first_loaded,
            tuple(chunks),
            history.first_hidden,
        )
        return msgspec.structs.replace(output, timing=timing)

    def _stall(self, plan: StepPlan, seconds: float) -> float:
        """Return the seconds by which prefill delayed the decodes of this step; 0 until a step without prefill was measured.

        Decodes that the step excluded waited for the whole step.
        """
        if not plan.decodes:
            return seconds if plan.excluded_decodes else 0.0
        if not plan.prefill_tokens:
            self._decode_seconds = _KEEP * self._decode_seconds + (1 - _KEEP) * seconds if self._decode_seconds else seconds
            return 0.0
        return max(0.0, seconds - self._decode_seconds) if self._decode_seconds else 0.0
