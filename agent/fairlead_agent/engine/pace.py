"""Pace of prefill, measured from answers. Pure: the caller gives the time."""

from collections import deque
from typing import Final

LARGE_SHARE: Final = 0.5
"""Periods with fewer tokens than this share of the largest recent prompt are not measured. Much of their time is that of a step and of
HTTP: an engine with short prompts would seem slow, so routers would never send it a long prompt, which alone shows its pace."""
MIN_PERIOD_TOKENS: Final = 128
"""Least tokens of a period that is measured."""
RECENT: Final = 256
"""Newest prompts whose largest counts."""
PROMPTS: Final = 8
"""A period ends when the engine has nothing to compute, or after this many times the largest recent prompt."""
TOGETHER_SECONDS: Final = 0.002
"""First tokens that follow each other this closely come from one step: no period ends between them."""
PERIODS: Final = 32
"""Newest periods that count."""
MIN_TOKENS: Final = 1024
"""Measured tokens before the pace counts as known."""
QUANTILE: Final = 0.9
"""Share of the tokens whose periods were slower than the pace: other work on the machine can only make a period slower."""


class PrefillPace:
    """Prompt tokens per second of the time in which streamed requests wait for their first token.

    The engine prefills nearly all of that time, whatever the number of requests, so concurrent requests do not count twice. The pace is
    that of the faster periods, so that equal engines have nearly equal paces. With medians of single steps two equal engines had 4,050 and
    8,811 tokens/s, and new conversations gathered on one of them.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._since = 0.0
        self._seconds, self._tokens = 0.0, 0
        """Those of the present period."""
        self._is_known = True
        """The tokens of all its prompts are known."""
        self._periods: deque[tuple[float, int]] = deque(maxlen=PERIODS)
        """Pace and tokens of each measured period."""
        self._prompts: deque[int] = deque(maxlen=RECENT)
        self.tokens_per_second = 0.0
        """The pace; 0 while it is unknown."""

    def begin(self, now: float) -> None:
        """Record that a request was sent."""
        if not self._waiting:
            self._since = now
        self._waiting += 1

    def end(self, now: float, tokens: int) -> None:
        """Record a request's first token, or its end without one. `tokens`: prompt tokens that it computed; 0: unknown."""
        spent, self._since = now - self._since, now
        if spent > TOGETHER_SECONDS and self._tokens >= PROMPTS * max(self._prompts, default=1):
            self._end_period()
        self._waiting -= 1
        self._seconds += spent
        self._tokens += tokens
        self._is_known = self._is_known and tokens > 0
        if tokens:
            self._prompts.append(tokens)
        if not self._waiting:
            self._end_period()

    def computed_since(self, now: float) -> float:
        """Return the tokens that the engine has probably computed since the last first token, by the pace."""
        return self.tokens_per_second * (now - self._since) if self._waiting else 0.0

    def _end_period(self) -> None:
        seconds, tokens, is_known = self._seconds, self._tokens, self._is_known
        self._seconds, self._tokens, self._is_known = 0.0, 0, True
        if not is_known or seconds <= 0 or tokens < max(MIN_PERIOD_TOKENS, LARGE_SHARE * max(self._prompts)):
            return
        self._periods.append((tokens / seconds, tokens))
        total = sum(tokens for _, tokens in self._periods)
        if total < MIN_TOKENS:
            return
        slower = 0
        for pace, tokens in sorted(self._periods):
            slower += tokens
            if slower >= QUANTILE * total:
                self.tokens_per_second = pace
                return
