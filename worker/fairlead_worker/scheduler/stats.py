"""Statistics of the engine: totals, and the recent speed by the step times that the runner measured."""

KEEP = 0.9
"""Weight of the past at each step: half of a reported value comes from the last seven steps."""
_FULL = 512
"""Prefill tokens of a step with full weight in the prefill rate. The time of a smaller step says less about it."""
_OUTLIER = 3.0
"""A step with prefill that took longer than this many times its expected time counts as that long. So one pause of the machine changes
little, and the rate still follows a machine that has become slower."""


class EngineStats:
    """Counters for `Load`. No clock: seconds come with each step's result.

    A step with prefill takes the time of a decode plus a time for each token. Only the second part is in the prefill rate, beside the first
    part's share of a full chunk. Else a worker whose prompts are nearly all cached would report the rate of its smallest steps, and routers
    would expect new prompts to take many times as long there.
    """

    def __init__(self, chunk: int = _FULL) -> None:
        """`chunk`: prefill tokens of a step while prompts wait."""
        self._chunk = chunk
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
        self._squares = 0.0
        """Weighted sum of the squared prefill tokens of steps."""
        self._token_seconds = 0.0
        """Weighted sum of prefill tokens times the seconds beyond a decode."""
        self._decode_seconds = 0.0
        self._decode_steps = 0.0
        self._fastest_decode = 0.0
        self._decode_only_seconds = 0.0
        """Of recent steps without prefill."""
        self._decode_only_steps = 0.0

    def record_step(self, prefill_tokens: int, decodes: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        if prefill_tokens:
            self._record_prefill(prefill_tokens, seconds)
        if decodes:
            self._decode_steps = KEEP * self._decode_steps + 1
            self._decode_seconds = KEEP * self._decode_seconds + seconds
            self._fastest_decode = min(seconds, self._fastest_decode or seconds)
            if not prefill_tokens:
                self._decode_only_steps = KEEP * self._decode_only_steps + 1
                self._decode_only_seconds = KEEP * self._decode_only_seconds + seconds

    def record_warmup(self, prefill_tokens: int, seconds: float) -> None:
        """Set the prefill rate by a warm-up step, which is not counted. Record the warm-up's decodes first."""
        self._squares = self._token_seconds = 0.0
        self._record_prefill(prefill_tokens, seconds)

    def record_warmup_decode(self, seconds: float) -> None:
        """Set the step time by a warm-up step with one decode, which is not counted. The fastest of several is kept."""
        self._fastest_decode = min(seconds, self._fastest_decode or seconds)
        self._decode_steps, self._decode_seconds = 1.0, self._fastest_decode

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second in full chunks, by the times of recent steps with prefill; 0 before the first."""
        if not self._squares:
            return 0.0
        seconds = self._chunk * self.seconds_per_token + self._fastest_decode
        return self._chunk / seconds if seconds > 0 else 0.0

    @property
    def decode_seconds(self) -> float:
        """Mean time of recent steps without prefill; before them the fastest step with decodes, 0 before any."""
        return self._decode_only_seconds / self._decode_only_steps if self._decode_only_steps else self._fastest_decode

    @property
    def seconds_per_token(self) -> float:
        """Seconds beyond a decode by the prefill tokens: least squares through the origin. 0 before the first step with prefill."""
        return self._token_seconds / self._squares if self._squares else 0.0

    def _record_prefill(self, tokens: int, seconds: float) -> None:
        if self._squares:
            seconds = min(seconds, _OUTLIER * (self._fastest_decode + self.seconds_per_token * tokens) or seconds)
        weight = min(1.0, tokens / _FULL) ** 2
        keep = KEEP**weight
        self._squares = keep * self._squares + tokens * tokens
        self._token_seconds = keep * self._token_seconds + tokens * max(0.0, seconds - self._fastest_decode)

    def step_seconds(self, is_running: bool) -> float:
        """Return the seconds of a decode step, 0 before the first: the mean of recent ones while requests run, else the fastest.

        The recent steps of a worker that became idle say how busy it was, not how fast its next request will be.
        """
        if not is_running:
            return self._fastest_decode
        return self._decode_seconds / self._decode_steps if self._decode_steps else 0.0
