"""What the engine reports of itself: totals, and recent speed from the step times that the runner measured."""

_KEEP = 0.9
"""Weight of the past at each step: half of what is reported comes from the last seven steps."""


class EngineStats:
    """Counters for `Load`. No clock: seconds come with each step's result."""

    __slots__ = (
        "_decode_seconds",
        "_decode_steps",
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
        """Of requests at their first admission."""
        self.cached_tokens = 0
        """Of these, from the prefix cache. Readmission after a retraction counts as neither: it would flatter the hit rate."""
        self.host_cached_tokens = 0
        """Of `cached_tokens`, those whose KV came back from the host tier."""
        self.output_tokens = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        """Tokens computed again because of a retraction."""
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._decode_steps = 0.0

    def record_step(self, prefill_tokens: int, decodes: int, seconds: float) -> None:
        self.steps += 1
        if prefill_tokens:
            self._prefill_tokens = _KEEP * self._prefill_tokens + prefill_tokens
            self._prefill_seconds = _KEEP * self._prefill_seconds + seconds
        if decodes:
            self._decode_steps = _KEEP * self._decode_steps + 1
            self._decode_seconds = _KEEP * self._decode_seconds + seconds

    def record_warmup(self, prefill_tokens: int, seconds: float) -> None:
        """A step before the first request: nothing is counted, and the rate is known."""
        self._prefill_tokens, self._prefill_seconds = float(prefill_tokens), seconds

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second over recent steps with prefill in them; 0 before the first."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds > 0 else 0.0

    @property
    def step_seconds(self) -> float:
        """Mean time of recent steps with decodes in them: the ITL of a running request."""
        return self._decode_seconds / self._decode_steps if self._decode_steps else 0.0
