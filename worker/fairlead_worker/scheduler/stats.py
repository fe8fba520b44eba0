"""Statistics of the engine: totals, and the recent speed by the step times that the runner measured."""

KEEP = 0.9
"""Weight of the past at each step: half of a reported value comes from the last seven steps."""


class EngineStats:
    """Counters for `Load`. No clock: seconds come with each step's result."""

    __slots__ = (
        "_decode_seconds",
        "_decode_steps",
        "_fastest_decode",
        "_prefill_seconds",
        "_prefill_tokens",
        "cached_tokens",
        "host_cached_tokens",
        "output_tokens",
        "preemptions",
        "prompt_tokens",
        "recomputed_tokens",
        "steps",
    )

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        """Prompt tokens of all requests, counted at their first admission."""
        self.cached_tokens = 0
        """Those of `prompt_tokens` whose KV came from the prefix cache. A readmission is not counted: it would raise the hit rate."""
        self.host_cached_tokens = 0
        """Those of `cached_tokens` whose KV came back from the host tier."""
        self.output_tokens = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        """Tokens computed again after a preemption."""
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._decode_steps = 0.0
        self._fastest_decode = 0.0

    def record_step(self, prefill_tokens: int, decodes: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        if prefill_tokens:
            self._prefill_tokens = KEEP * self._prefill_tokens + prefill_tokens
            self._prefill_seconds = KEEP * self._prefill_seconds + seconds
        if decodes:
            self._decode_steps = KEEP * self._decode_steps + 1
            self._decode_seconds = KEEP * self._decode_seconds + seconds
            self._fastest_decode = min(seconds, self._fastest_decode or seconds)

    def record_warmup(self, prefill_tokens: int, seconds: float) -> None:
        """Set the prefill rate by a warm-up step, which is not counted."""
        self._prefill_tokens, self._prefill_seconds = float(prefill_tokens), seconds

    def record_warmup_decode(self, seconds: float) -> None:
        """Set the step time by a warm-up step with one decode, which is not counted."""
        self._decode_steps, self._decode_seconds, self._fastest_decode = 1.0, seconds, seconds

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second in recent steps with prefill; 0 before the first."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds > 0 else 0.0

    def step_seconds(self, is_running: bool) -> float:
        """Return the seconds of a decode step, 0 before the first: the mean of recent ones while requests run, else the fastest.

        The recent steps of a worker that became idle say how busy it was, not how fast its next request will be.
        """
        if not is_running:
            return self._fastest_decode
        return self._decode_seconds / self._decode_steps if self._decode_steps else 0.0
