"""Pace of prefill, measured from answers. Pure: the caller gives the time."""

from math import exp

WINDOW_SECONDS = 30.0
"""Busy time after which a measurement counts 1/e."""
TOGETHER_SECONDS = 0.002
"""First tokens that follow each other this closely come from one step."""
MIN_TOKENS = 1024
"""Computed tokens before the pace counts as known."""
MIN_STEP_TOKENS = 128
"""Least mean of tokens of a measurement. The time of fewer is mostly that of a step and of HTTP: an idle engine would seem slow."""


class PrefillPace:
    """Prompt tokens per second of the time in which streamed requests wait for their first token.

    The engine prefills nearly all of that time, whatever the number of requests, so concurrent requests do not count twice. A part of the
    time does not depend on the tokens. It is left out by linear regression, where the measurements differ enough in tokens.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._since = 0.0
        self._step_seconds = self._step_tokens = 0.0
        self._count = self._seconds = self._tokens = self._squares = self._products = 0.0
        """Sums over measurements: their number, seconds, tokens, squares of tokens, tokens times seconds."""

    def begin(self, now: float) -> None:
        """Record that a request was sent."""
        if not self._waiting:
            self._since = now
        self._waiting += 1

    def end(self, now: float, tokens: int) -> None:
        """Record a request's first token, or its end without one. `tokens`: prompt tokens that it computed; 0: unknown."""
        spent, self._since = now - self._since, now
        self._waiting -= 1
        if not tokens:
            return
        if spent > TOGETHER_SECONDS:
            self._add(self._step_seconds, self._step_tokens)
            self._step_seconds = self._step_tokens = 0.0
        self._step_seconds += spent
        self._step_tokens += tokens

    @property
    def tokens_per_second(self) -> float:
        """The pace; 0 while it is unknown."""
        count, tokens = self._count + 1, self._tokens + self._step_tokens
        if not self._step_seconds or tokens < MIN_TOKENS or tokens / count < MIN_STEP_TOKENS:
            return 0.0
        seconds, squares = self._seconds + self._step_seconds, self._squares + self._step_tokens**2
        products = self._products + self._step_tokens * self._step_seconds
        spread = count * squares - tokens**2
        if spread > 0.1 * tokens**2:
            each = (count * products - tokens * seconds) / spread
            if 0 < each < seconds / tokens:  # else the times say nothing about a fixed part
                return 1 / each
        return tokens / seconds

    def _add(self, seconds: float, tokens: float) -> None:
        if not seconds:
            return
        kept = exp(-seconds / WINDOW_SECONDS)
        self._count = self._count * kept + 1
        self._seconds = self._seconds * kept + seconds
        self._tokens = self._tokens * kept + tokens
        self._squares = self._squares * kept + tokens**2
        self._products = self._products * kept + tokens * seconds
