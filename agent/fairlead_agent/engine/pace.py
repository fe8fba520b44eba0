"""Pace of prefill, measured from answers. Pure: the caller gives the time."""

from collections import deque
from typing import Final

TOGETHER_SECONDS: Final = 0.002
"""First tokens that follow each other this closely come from one step."""
MIN_PERIOD_TOKENS: Final = 128
"""Least tokens of a period that is measured."""
LARGE_SHARE: Final = 0.5
"""Periods with fewer tokens than this share of the largest recent prompt are not measured either. Much of their time is that of a step and
of HTTP: an engine with short prompts would seem slow, so routers would never send it a long prompt, which alone shows its pace."""
RECENT: Final = 256
"""Newest prompts whose largest counts."""
PROMPTS: Final = 4
"""A period ends when the engine has nothing to compute, or with the step after this many times the largest recent prompt."""
PERIODS: Final = 32
"""Newest periods that count."""
MIN_TOKENS: Final = 1024
"""Measured tokens before the pace counts as known."""
QUANTILE: Final = 0.75
"""Share of the tokens in periods that were not faster than the pace. Other work on the machine only makes periods slower. Faster ones hold
blocks that the engine had and the agent did not know of."""


class PrefillPace:
    """Prompt tokens per second of the time in which streamed requests wait for their first token.

    The engine prefills nearly all of that time, whatever the number of requests, so concurrent requests do not count twice. The pace is the
    75th percentile of the recent periods, by tokens. With medians of single steps two equal engines had 4,050 and 8,811 tokens/s, and new
    conversations gathered on one of them.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._since = 0.0
        self._step_seconds, self._step_tokens, self._is_known = 0.0, 0, True
        """Seconds and tokens of the current step, and whether the tokens of all its prompts are known."""
        self._seconds, self._tokens = 0.0, 0
        """Those of the current period, without the current step."""
        self._periods: deque[tuple[float, int]] = deque(maxlen=PERIODS)
        """Pace and tokens of each measured period."""
        self._prompts: deque[int] = deque(maxlen=RECENT)
        """Tokens of each prompt."""
        self.tokens_per_second = 0.0
        """The pace; 0 while it is unknown."""

    def begin(self, now: float) -> None:
        """Record that a request was sent."""
        if not self._waiting:
            self._since = now
        self._waiting += 1

    def end(self, now: float, tokens: int) -> None:
        """Record a request's first token, or its end without one. `tokens`: prompt tokens that it computed; 0: unknown, or none."""
        spent, self._since = now - self._since, now
        if spent > TOGETHER_SECONDS:
            self._end_step()
            if self._tokens >= PROMPTS * max(self._prompts, default=1):
                self._end_period()
        self._waiting -= 1
        self._step_seconds += spent
        self._step_tokens += tokens
        if tokens:
            self._prompts.append(tokens)
        else:
            self._is_known = False
        if not self._waiting:
            self._end_step()
            self._end_period()

    def computed_since(self, now: float) -> float:
        """Return the tokens that the engine has probably computed since the last first token, by the pace."""
        return self.tokens_per_second * (now - self._since) if self._waiting else 0.0

    def _end_step(self) -> None:
        if self._is_known:
            self._seconds += self._step_seconds
            self._tokens += self._step_tokens
        self._step_seconds, self._step_tokens, self._is_known = 0.0, 0, True

    def _end_period(self) -> None:
        seconds, tokens = self._seconds, self._tokens
        self._seconds, self._tokens = 0.0, 0
        if seconds <= 0 or tokens < max(MIN_PERIOD_TOKENS, LARGE_SHARE * max(self._prompts, default=0)):
            return
        self._periods.append((tokens / seconds, tokens))
        total = sum(tokens for _, tokens in self._periods)
        if total < MIN_TOKENS:
            return
        counted = 0
        for pace, tokens in sorted(self._periods):
            counted += tokens
            if counted >= QUANTILE * total:
                self.tokens_per_second = pace
                return
