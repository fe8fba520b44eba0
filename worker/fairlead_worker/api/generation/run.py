"""A prepared request's way through the engine: its pieces, its times, and one line in the log when it is over."""

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fairlead_common.truncate import brief
from fairlead_worker.api.engine.client import Generation
from fairlead_worker.api.errors import ApiError, busy, failed, invalid
from fairlead_worker.api.generation.choice import Piece, SequenceFailed
from fairlead_worker.api.generation.prepare import Prepared
from fairlead_worker.api.worker import Worker
from fairlead_worker.messages import GRAMMAR_WAITED

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Run:
    """One pass of a prepared request through the engine, timed for the metrics and the log."""

    worker: Worker
    prepared: Prepared
    began: float = field(default_factory=time.monotonic)
    _first: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Of each choice: when its first token came, and the engine's stall seconds until then."""
    _last: dict[int, float] = field(default_factory=dict)
    _stall: float = 0.0
    """Seconds that the choice which waited longest for others' prefill did so, between its first and last token."""

    async def pieces(self, generation: Generation) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Batches of (choice, piece). Raises EngineGone, or ApiError where the engine gave a sequence up."""
        metrics, choices = self.worker.metrics, self.prepared.choices
        async for batch in generation.outputs():
            now = time.monotonic()
            pieces = []
            for index, output in batch:
                choice = choices[index]
                if choice.finish_reason is not None:  # a stop string was met earlier in this batch
                    continue
                self._time(index, now)
                try:
                    pieces.append((index, choice.take(output)))
                except SequenceFailed as error:
                    choice.finish_reason = "error"
                    metrics.finished("error")
                    raise self._fault(index, error) from error
                if choice.finish_reason is not None:
                    self._finished(index, now)
                    if output.finish is None:
                        generation.abort(index)
            if pieces:
                yield pieces

    def _fault(self, index: int, error: SequenceFailed) -> ApiError:
        """A grammar is tried before the engine sees it, but not along every way through it: what it meets there is the request's fault."""
        if not self.prepared.submissions[index].grammar:
            return failed(str(error))
        if str(error).startswith(GRAMMAR_WAITED):
            return busy(str(error), max(1, round(self.worker.config.grammar_timeout)))
        return invalid(f"{brief(error)}: a limit of the compiler, or a dead end; make the grammar smaller, or its repetitions shorter")

    def gone(self) -> None:
        """The client left before the end."""
        for choice in self.prepared.choices:
            if choice.finish_reason is None:
                choice.finish_reason = "abort"
                self.worker.metrics.finished("abort")

    def log(self, request_id: str) -> None:
        """One line of JSON, without a word or token of the request: `queue_ms` to `stall_ms` are those of its slowest sequence."""
        timings = [choice.timing for choice in self.prepared.choices if choice.timing is not None]
        usage = self.prepared.usage()
        first = min((at for at, _ in self._first.values()), default=None)
        line: dict[str, Any] = {
            "request": request_id,
            "finish": sorted({choice.finish_reason or "error" for choice in self.prepared.choices}),
            "prompts": len(self.prepared.prompts),
            "sequences": len(self.prepared.choices),
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "host_cached_tokens": self.prepared.host_cached_tokens(),
            "output_tokens": usage["completion_tokens"],
            "queue_ms": _ms(max((timing.queue_seconds for timing in timings), default=None)),
            "prefill_ms": _ms(max((timing.prefill_seconds for timing in timings), default=None)),
            "ttft_ms": _ms(None if first is None else first - self.began),
            "stall_ms": _ms(self._stall),
            "e2e_ms": _ms(time.monotonic() - self.began),
            "retractions": sum(timing.preemptions for timing in timings),
        }
        logger.info("finished %s", msgspec.json.encode(line).decode())

    def _time(self, index: int, now: float) -> None:
        if not self._last:
            self.worker.metrics.first_token.observe(now - self.began)
        if index in self._last:
            self.worker.metrics.token_gap.observe(now - self._last[index])
        else:
            self._first[index] = now, self.worker.engine.state.stall_seconds
        self._last[index] = now

    def _finished(self, index: int, now: float) -> None:
        metrics, choice = self.worker.metrics, self.prepared.choices[index]
        first, stalled = self._first[index]
        assert choice.finish_reason is not None
        metrics.finished(choice.finish_reason)
        metrics.whole_request.observe(now - self.began)
        metrics.decode_time.observe(now - first)
        metrics.prompt_size.observe(len(self.prepared.prompts[index // self.prepared.best_of]))
        metrics.generation_size.observe(choice.generated)
        if choice.timing is not None:
            metrics.queue_time.observe(choice.timing.queue_seconds)
            metrics.prefill_time.observe(choice.timing.prefill_seconds)
        self._stall = max(self._stall, self.worker.engine.state.stall_seconds - stalled)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
