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
        self._waiting: set[str] = set()
        """Ids of requests that are not admitted yet."""
        self._awaiting_first_token: set[str] = set()
        """Ids of requests without a token since their latest admission."""
        self._chunks: dict[str, list[Chunk]] = {}
        """Prefill since the latest admission, by the id of each traced request."""
        self._decode_seconds = 0.0
        """Recent seconds of a step that only decodes; 0 before the first."""

    def record_arrival(self, message: Submit) -> None:
        """Store when a request arrived."""
        if message.id not in self._times:
            self._times[message.id] = _Times(message.received_at or self._clock())
            self._waiting.add(message.id)
            if message.traced:
                self._chunks[message.id] = []

    def record_plan(self, plan: StepPlan) -> None:
        """Store when the requests of a plan were admitted. Call it before the step runs."""
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
        """Write the step to the schedule trace, and store chunks of traced requests."""
        if self._chunks and plan.prefill_tokens:
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
        request_id = output.id
        if request_id in self._awaiting_first_token and (output.tokens or output.embedding):
            self._awaiting_first_token.discard(request_id)
            output = self._add_timing(output)
        if output.finish is not None:
            self._times.pop(request_id, None)
            self._waiting.discard(request_id)
            self._awaiting_first_token.discard(request_id)
            self._chunks.pop(request_id, None)
        return output

    def _record_chunks(self, plan: StepPlan, seconds: float) -> None:
        started = self._clock() - seconds
        for row in plan.rows:
            chunks = self._chunks.get(row.request.id)
            if chunks is None or row.request.id not in self._awaiting_first_token:
                continue
            if len(chunks) < MAX_CHUNKS:
                chunks.append(Chunk(started, seconds, row.start, row.count))
            else:  # the last one covers all further steps
                last = chunks[-1]
                chunks[-1] = Chunk(last.started, started + seconds - last.started, last.start, last.tokens + row.count)

    def _add_timing(self, output: Output) -> Output:
        times = self._times[output.id]
        assert times.request is not None, "a request with a token was admitted"
        if times.reported_preemptions < 0:
            times.first_token = self._clock()
        history = times.request.history
        times.reported_preemptions = history.preemptions
        timing = Timing(
            times.admitted - times.arrived,
            times.first_token - times.admitted,
            history.preemptions,
            history.first_loaded,
            self._take_chunks(output.id),
            history.first_hidden,
        )
        return msgspec.structs.replace(output, timing=timing)

    def _take_chunks(self, request_id: str) -> tuple[Chunk, ...]:
        if request_id not in self._chunks:
            return ()
        chunks, self._chunks[request_id] = self._chunks[request_id], []
        return tuple(chunks)

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
