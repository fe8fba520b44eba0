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
from fairlead_worker.messages import Abort, CacheEvent, Decoded, Load, Output, Step, Submit, Timing
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.request import Request
from fairlead_worker.scheduler.step_outputs import StepOutputs

_KEEP = 0.9
"""Weight of the past in the time of a step that only decodes."""


@dataclass(slots=True)
class _Seen:
    """One request's times, monotonic seconds."""

    taken: float
    admitted: float = 0.0
    first_token: float = 0.0
    request: Request | None = None
    told: int = -1
    """Retractions that the API knows of; -1 before the first token."""


class RequestTimer:
    """Follows the loop: `received`, `planned`, `executed`, then `report` for each step. Its answer is the `Step` to send."""

    def __init__(self, trace: ScheduleTrace | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace = trace
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._waiting: set[str] = set()
        """Not admitted yet."""
        self._silent: set[str] = set()
        """Admitted, no token yet since the admission."""
        self._decode_seconds = 0.0
        """Recent time of steps that only decode; 0 before the first."""

    def received(self, message: Submit | Abort) -> None:
        if isinstance(message, Submit) and message.id not in self._seen:
            self._seen[message.id] = _Seen(message.asked or self._clock())
            self._waiting.add(message.id)

    def planned(self, plan: StepPlan) -> None:
        """Admissions are dated when their first step is about to run."""
        if not plan.prefill_tokens:
            return
        now = self._clock()
        for row in plan.rows:
            name = row.request.id
            if name in self._waiting:
                self._waiting.discard(name)
                seen = self._seen[name]
                seen.admitted, seen.request = now, row.request
                self._silent.add(name)
            elif row.request.retractions and (known := self._seen.get(name)) and known.told < row.request.retractions:
                self._silent.add(name)

    def executed(self, plan: StepPlan, result: StepResult) -> None:
        """Between the forward pass and `advance`, which moves the rows on to the next step."""
        if self._trace is not None:
            self._trace.step(plan, result.seconds)

    def report(self, plan: StepPlan, result: StepResult, outputs: StepOutputs, events: tuple[CacheEvent, ...], load: Load) -> Step:
        """The step as a message: outputs with their timing where it is news, and what the step cost."""
        decoded = Decoded(tuple([request.id for request in outputs.decoded]), token_bytes(outputs.tokens))
        stall = self._stall(plan, result.seconds)
        stalled = plan.decodes + plan.left_out if stall else 0
        told = tuple([self._timed(output) for output in outputs.told])
        return Step(told, decoded, events, load, result.seconds, plan.prefill_tokens, plan.decodes, stall, stalled)

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()

    def _timed(self, output: Output) -> Output:
        name = output.id
        if name in self._silent and (output.tokens or output.embedding):
            self._silent.discard(name)
            output = self._tell(output)
        if output.finish is not None:
            self._seen.pop(name, None)
            self._waiting.discard(name)
            self._silent.discard(name)
        return output

    def _tell(self, output: Output) -> Output:
        seen = self._seen[output.id]
        assert seen.request is not None, "it was admitted"
        if seen.told < 0:
            seen.first_token = self._clock()
        seen.told = seen.request.retractions
        timing = Timing(seen.admitted - seen.taken, seen.first_token - seen.admitted, seen.told, seen.request.first_loaded)
        return msgspec.structs.replace(output, timing=timing)

    def _stall(self, plan: StepPlan, seconds: float) -> float:
        """Seconds by which this step was longer for its decodes than one without prefill is; 0 until such a one was seen. Decodes that it
        left out have waited for all of it."""
        if not plan.decodes:
            return seconds if plan.left_out else 0.0
        if not plan.prefill_tokens:
            self._decode_seconds = _KEEP * self._decode_seconds + (1 - _KEEP) * seconds if self._decode_seconds else seconds
            return 0.0
        return max(0.0, seconds - self._decode_seconds) if self._decode_seconds else 0.0
