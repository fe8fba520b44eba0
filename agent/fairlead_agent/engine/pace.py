"""Pace of prefill, measured from answers. Pure: the caller gives the time."""

from collections import deque

TOGETHER_SECONDS = 0.002
"""First tokens that follow each other this closely come from one step."""
MIN_STEP_TOKENS = 128
"""Least tokens of a step that is measured."""
LARGE_SHARE = 0.5
"""Steps with less than this share of the largest recent step's tokens are not measured either. Much of their time is that of a step and of
HTTP: an engine with short prompts would seem slow, so routers would never send it a long prompt, which alone shows its pace."""
RECENT = 256
"""Newest steps whose largest counts."""
MIN_TOKENS = 1024
"""Measured tokens before the pace counts as known."""
STEPS = 32
"""Newest measurements that count."""


class PrefillPace:
    """Prompt tokens per second of the time in which streamed requests wait for their first token.

    The engine prefills nearly all of that time, whatever the number of requests, so concurrent requests do not count twice. The pace is the
    median of the steps, by their tokens: other work on the machine makes single steps slower.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._since = 0.0
        self._step_seconds, self._step_tokens = 0.0, 0
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS)
        """Pace and tokens of each measured step."""
        self._sizes: deque[int] = deque(maxlen=RECENT)
        """Tokens of each step that could be measured."""
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
        self._waiting -= 1
        if spent > TOGETHER_SECONDS:
            self._end_step()
        self._step_seconds += spent
        self._step_tokens += tokens
        if not tokens:
            self._step_seconds, self._step_tokens = 0.0, 0

    def computed_since(self, now: float) -> float:
        """Return the tokens that the engine has probably computed since the last first token, by the pace."""
        return self.tokens_per_second * (now - self._since) if self._waiting else 0.0

    def _end_step(self) -> None:
        seconds, tokens = self._step_seconds, self._step_tokens
        self._step_seconds, self._step_tokens = 0.0, 0
        if tokens < MIN_STEP_TOKENS or seconds <= 0:
            return
        self._sizes.append(tokens)
        if tokens < LARGE_SHARE * max(self._sizes):
            return
        self._steps.append((tokens / seconds, tokens))
        total = sum(tokens for _, tokens in self._steps)
        if total < MIN_TOKENS:
            return
        below = 0
        for pace, tokens in sorted(self._steps):
            below += tokens
            if 2 * below >= total:
                self.tokens_per_second = pace
                return
