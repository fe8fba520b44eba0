"""Spans of a request's time in the engine, made from the timings in its outputs.

The engine process has no OpenTelemetry: it reports times of traced requests, and this process, which has the trace, exports them.
"""

from collections.abc import Mapping

from fairlead_common.telemetry.spans import Span
from fairlead_worker.ipc.messages import Output

MAX_TRACED = 8
"""Sequences of a request that get spans, the first ones."""


class EngineSpans:
    """Spans `queue`, `prefill chunk` and `decode` of each sequence, within the request's span, which is recorded."""

    def __init__(self, span: Span, submitted: float) -> None:
        """`submitted`: when the engine got the request, in `time.monotonic` seconds."""
        self._span, self._submitted = span, submitted
        self._decoding: dict[int, float] = {}
        """By sequence: when its first token came."""

    def record(self, index: int, output: Output, now: float) -> None:
        """Open and close spans for one output, which came at `now`."""
        timing = output.timing
        if timing is None or index >= MAX_TRACED:
            return
        if index not in self._decoding:
            self._decoding[index] = now
            queue = self._span.child("queue", start=self._submitted)
            queue.set({"fairlead.sequence": index})
            queue.end(self._submitted + timing.queue_seconds)
        for chunk in timing.chunks:
            prefill = self._span.child("prefill chunk", start=chunk.started)
            prefill.set({"fairlead.sequence": index, "fairlead.start": chunk.start, "fairlead.tokens": chunk.tokens})
            prefill.end(chunk.started + chunk.seconds)

    def finish(self, last: Mapping[int, float], output_tokens: Mapping[int, int]) -> None:
        """Add the decode spans. `last`: by sequence, when its last token came; `output_tokens`: by sequence."""
        for index, first in self._decoding.items():
            decode = self._span.child("decode", start=first)
            decode.set({"fairlead.sequence": index, "gen_ai.usage.output_tokens": output_tokens.get(index)})
            decode.end(last.get(index, first))
