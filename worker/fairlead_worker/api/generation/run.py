"""One pass of a request through the engine: its deltas, its timing, and one log line at the end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from fairlead_common.telemetry.spans import Span
from fairlead_common.truncate import truncate
from fairlead_worker.api.engine.generation import Generation
from fairlead_worker.api.engine.spans import EngineSpans
from fairlead_worker.api.errors import ApiError, busy, failed, invalid
from fairlead_worker.api.generation.choice import OutputDelta, SequenceFailed
from fairlead_worker.api.generation.prepare import GenerationRequest
from fairlead_worker.api.request_cpu import RequestCpu
from fairlead_worker.api.worker import Worker
from fairlead_worker.ipc.messages import GRAMMAR_WAITED, Output, Timing

logger = logging.getLogger(__name__)

MAX_ENTRIES = 1000
"""Log-probabilities that are formatted before other requests get their turn: a few milliseconds."""
OUTPUT_ENTRIES = 16
"""An output takes as long as so many log-probabilities. An engine makes the tokens of 64 choices faster than this process reads them, so
without turns a request with one token waited for all that had come for such a request: 0.35 s."""


@dataclass(slots=True)
class GenerationRun:
    """One pass of a request through the engine, timed for metrics and the log."""

    worker: Worker
    generation_request: GenerationRequest
    span: Span
    cpu: RequestCpu
    start_time: float = field(default_factory=time.monotonic)
    engine_spans: EngineSpans | None = field(init=False)
    """None: the request is not traced."""
    _first: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By choice: the time of its first token, and the engine's stall seconds up to that time."""
    _last: dict[int, float] = field(default_factory=dict)
    _stall: float = 0.0
    """Seconds that other requests' prefill delayed decoding between first and last token, for the choice that waited longest."""

    def __post_init__(self) -> None:
        self.engine_spans = EngineSpans(self.span, self.start_time) if self.span.is_recording else None

    async def deltas(self, generation: Generation) -> AsyncIterator[list[tuple[int, OutputDelta]]]:
        """Yield batches of (choice, delta). Raise EngineGone, or ApiError if the engine ended a sequence with an error."""
        metrics, choices = self.worker.metrics, self.generation_request.choices
        async for batch in generation.outputs():
            now, entries = time.monotonic(), 0
            deltas: list[tuple[int, OutputDelta]] = []
            for index, output in batch:
                if entries > MAX_ENTRIES:  # other requests get their turn
                    yield deltas
                    await asyncio.sleep(0)
                    deltas, entries = [], 0
                entries += OUTPUT_ENTRIES + sum(len(each.top_ids) for each in output.logprobs)
                choice = choices[index]
                if choice.finish_reason is not None:  # an earlier output of this batch contained a stop string
                    continue
                if output.mask_seconds:
                    self.add_masks(index, output)
                self._record_token(index, now)
                if self.engine_spans is not None:
                    self.engine_spans.record(index, output, now)
                try:
                    deltas.append((index, choice.process(output)))
                except SequenceFailed as error:
                    choice.finish_reason = "error"
                    metrics.count_finished("error")
                    raise self._to_api_error(index, error) from error
                if choice.finish_reason is not None:
                    self._record_finish(index, now)
                    if output.finish is None:
                        generation.abort(index, partial(self.add_masks, index))
            if deltas:
                yield deltas

    def add_masks(self, index: int, output: Output) -> None:
        """Charge the masks that a choice's last output tells, also of one that a stop string has ended here."""
        self.cpu.add_masks(output.mask_seconds, self.generation_request.choices[index].output_tokens)

    def _to_api_error(self, index: int, error: SequenceFailed) -> ApiError:
        """Return the error of a failed sequence. The grammar check cannot try every path of a grammar, so its failure is a 400."""
        if not self.generation_request.submits[index].grammar:
            return failed(str(error))
        if str(error).startswith(GRAMMAR_WAITED):
            return busy(str(error), max(1, round(self.worker.config.limits.grammar_timeout)))
        return invalid(
            f"{truncate(error)}: a limit of the compiler or a dead end of the grammar; make it smaller, or its repetitions shorter"
        )

    def record_disconnect(self) -> None:
        """Mark unfinished choices as aborted, because the client disconnected or the router withdrew the request."""
        for choice in self.generation_request.choices:
            if choice.finish_reason is None:
                choice.finish_reason = "abort"
                self.worker.metrics.count_finished("abort")

    def log_summary(self, request_id: str) -> None:
        """Log what the request took, and finish its spans. `stall_ms` is that of the slowest sequence."""
        timings = [choice.timing for choice in self.generation_request.choices if choice.timing is not None]
        usage, cached = self.generation_request.usage(), self.generation_request.count_cached()
        first = min((at for at, _ in self._first.values()), default=None)
        line: dict[str, Any] = {
            "request": request_id,
            "finish": sorted({choice.finish_reason or "error" for choice in self.generation_request.choices}),
            "prompts": len(self.generation_request.prompts),
            "sequences": len(self.generation_request.choices),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": cached.total,
            "host_cached_tokens": cached.from_host,
            "output_tokens": usage.completion_tokens,
            "ttft_ms": _ms(None if first is None else first - self.start_time),
            "stall_ms": _ms(self._stall),
        }
        log_finished(line, timings, self.start_time)
        if self.engine_spans is not None:
            self.engine_spans.finish(
                self._last, {index: choice.output_tokens for index, choice in enumerate(self.generation_request.choices)}
            )
            self.span.set(
                {
                    "gen_ai.response.finish_reasons": ",".join(line["finish"]),
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "fairlead.cached_tokens": cached.total,
                    "fairlead.preemptions": sum(timing.preemptions for timing in timings),
                }
            )

    def _record_token(self, index: int, now: float) -> None:
        if not self._last:
            self.worker.metrics.time_to_first_token.observe(now - self.start_time)
        if index in self._last:
            self.worker.metrics.inter_token_latency.observe(now - self._last[index])
        else:
            self._first[index] = now, self.worker.engine.state.stall_seconds
        self._last[index] = now

    def _record_finish(self, index: int, now: float) -> None:
        metrics, choice = self.worker.metrics, self.generation_request.choices[index]
        first, stalled = self._first[index]
        assert choice.finish_reason is not None
        metrics.count_finished(choice.finish_reason)
        metrics.e2e_latency.observe(now - self.start_time)
        metrics.decode_time.observe(now - first)
        metrics.prompt_size.observe(len(self.generation_request.prompts[index // self.generation_request.options.best_of]))
        metrics.generation_size.observe(choice.output_tokens)
        if choice.timing is not None:
            metrics.queue_time.observe(choice.timing.queue_seconds)
            metrics.prefill_time.observe(choice.timing.prefill_seconds)
        self._stall = max(self._stall, self.worker.engine.state.stall_seconds - stalled)


def log_finished(line: dict[str, Any], timings: Sequence[Timing], start_time: float) -> None:
    """Log one line of JSON about a request, without any text or token of it. Add the times of its slowest sequence to `line`."""
    line |= {
        "queue_ms": _ms(max([timing.queue_seconds for timing in timings], default=None)),
        "prefill_ms": _ms(max([timing.prefill_seconds for timing in timings], default=None)),
        "e2e_ms": _ms(time.monotonic() - start_time),
        "preemptions": sum([timing.preemptions for timing in timings]),
    }
    logger.info("finished %s", msgspec.json.encode(line).decode())


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
