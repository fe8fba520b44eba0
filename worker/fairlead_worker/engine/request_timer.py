"""What the loop sees of time: when a request was taken, admitted and had its first token; what prefill cost the decodes beside it.

Host timestamps only. A step costs a few look-ups; rows are looked at only in steps with prefill, of outputs only those with more to tell
than a decode's token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from fairlead_index.hashing import token_bytes
from fairlead_worker.engine.schedule_trace import ScheduleTrace
from fairlead_worker.ipc.messages import Abort, CacheEvent, Decoded, Load, Output, Step, Submit, Timing
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.request import Request
from fairlead_worker.scheduler.step_outputs import StepOutputs

_KEEP = 0.9
"""Weight of the past in the time of a step that only decodes."""


@dataclass(slots=True)
class _Times:
    """One request's times, monotonic seconds."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0
    request: Request | None = None
    reported_preemptions: int = -1
    """Retractions that the API knows of; -1 before the first token."""


class RequestTimer:
    """Follows the loop: `record_arrival`, `record_plan`, `record_step`, then `report` for each step. Its answer is the `Step` to send."""

    def __init__(self, trace: ScheduleTrace | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace = trace
        self._clock = clock
        self._times: dict[str, _Times] = {}
        self._waiting: set[str] = set()
        """Not admitted yet."""
        self._awaiting_first_token: set[str] = set()
        """Admitted, no token yet since the admission."""
        self._decode_seconds = 0.0
        """Recent time of steps that only decode; 0 before the first."""

    def record_arrival(self, message: Submit | Abort) -> None:
        if isinstance(message, Submit) and message.id not in self._times:
            self._times[message.id] = _Times(message.received_at or self._clock())
            self._waiting.add(message.id)

    def record_plan(self, plan: StepPlan) -> None:
        """Admissions are dated when their first step is about to run."""
        if not plan.prefill_tokens:
            return
        now = self._clock()
        for row in plan.rows:
            request_id = row.request.id
            if request_id in self._waiting:
                self._waiting.discard(request_id)
                times = self._times[request_id]
                times.admitted, times.request = now, row.request
                self._awaiting_first_token.add(request_id)
            elif (preemptions := row.request.history.preemptions) and (
                (known := self._times.get(request_id)) and known.reported_preemptions < preemptions
            ):
                self._awaiting_first_token.add(request_id)

    def record_step(self, plan: StepPlan, result: StepResult) -> None:
        """Between the forward pass and `advance`, which moves the rows on to the next step."""
        if self._trace is not None:
            self._trace.step(plan if result.executed is None else result.executed, result.seconds)

    def report(self, plan: StepPlan, result: StepResult, outputs: StepOutputs, events: tuple[CacheEvent, ...], load: Load) -> Step:
        """The step as a message: outputs with their timing where it is news, and what the step cost."""
        decoded = Decoded(tuple([request.id for request in outputs.decoded]), token_bytes(outputs.tokens))
        stall = self._stall(plan, result.seconds)
        stalled = plan.decodes + plan.excluded_decodes if stall else 0
        told = tuple([self._with_timing(output) for output in outputs.full])
        return Step(told, decoded, events, load, result.seconds, plan.prefill_tokens, plan.decodes, stall, stalled)

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()

    def _with_timing(self, output: Output) -> Output:
        request_id = output.id
        if request_id in self._awaiting_first_token and (output.tokens or output.embedding):
            self._awaiting_first_token.discard(request_id)
            output = self._add_timing(output)
        if output.finish is not None:
            self._times.pop(request_id, None)
            self._waiting.discard(request_id)
            self._awaiting_first_token.discard(request_id)
        return output

    def _add_timing(self, output: Output) -> Output:
        times = self._times[output.id]
        assert times.request is not None, "it was admitted"
        if times.reported_preemptions < 0:
            times.first_token = self._clock()
        history = times.request.history
        times.reported_preemptions = history.preemptions
        timing = Timing(times.admitted - times.arrived, times.first_token - times.admitted, history.preemptions, history.first_loaded)
        return msgspec.structs.replace(output, timing=timing)

    def _stall(self, plan: StepPlan, seconds: float) -> float:
        """Seconds by which this step was longer for its decodes than one without prefill is; 0 until such a one was seen. Decodes that it
        left out have waited for all of it."""
        if not plan.decodes:
            return seconds if plan.excluded_decodes else 0.0
        if not plan.prefill_tokens:
            self._decode_seconds = _KEEP * self._decode_seconds + (1 - _KEEP) * seconds if self._decode_seconds else seconds
            return 0.0
        return max(0.0, seconds - self._decode_seconds) if self._decode_seconds else 0.0
