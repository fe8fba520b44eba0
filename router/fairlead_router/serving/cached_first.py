"""Which prompts go first while requests are refused: those of which most is cached. Pure: the caller gives the time.

A refused turn of an admitted conversation wastes the KV of the turns before it, and leaves the next turn more to compute. So where demand
exceeds the capacity, the capacity goes to the prompts with the least uncached share: a bid price (Talluri and van Ryzin, 1998) on the
tokens computed for each token of prompt. The others take turns in what is left. docs/design/router/cached-first.md derives it. `fairlead
simulate` runs the same code.
"""

import math
from typing import Final

from fairlead_router.serving.best_effort import STARVATION_SHARE
from fairlead_router.tenancy.tenants import LOWEST

HORIZON_SECONDS: Final = 4.0
"""Time constant of the measured demand, and time since the last refusal after which nothing is refused here."""
LEVELS: Final = 3
"""Levels of the uncached share: mostly cached, partly, mostly not. Prompts of one level do not go before each other, because with many
levels long contexts go first, whose decodes are slow."""


class CachedFirst:
    """Demand of the recent requests, by priority and uncached share, and the turns of those of which less is cached."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, int], float] = {}
        """Tokens to compute, each counted less the older it is. By priority and level; less urgent ones than LOWEST share an entry, because
        each request looks at all entries and a client without a key may send any number."""
        self._at = self._refused_at = -math.inf
        self._next_turn = [-math.inf] * LEVELS
        """When the next request of each level has its turn."""

    def record(self, priority: int, tokens: float, prompt_tokens: float, now: float) -> None:
        """Record a request that arrives for the first time. `tokens`: those of its prompt to compute."""
        kept = math.exp((self._at - now) / HORIZON_SECONDS)
        self._tokens = {key: left for key, value in self._tokens.items() if (left := kept * value) >= 1.0}
        self._at = now
        key = min(priority, LOWEST), _level(tokens, prompt_tokens)
        self._tokens[key] = self._tokens.get(key, 0.0) + tokens

    def record_refusal(self, now: float) -> None:
        """Record that no worker could serve a request within its bounds."""
        self._refused_at = now

    def next_turn(self, tokens: float, prompt_tokens: float, now: float) -> float:
        """Return the seconds until a request's turn, 0: now.

        0 unless requests were refused lately, so that a short burst that the queues can take refuses nothing.
        """
        if now - self._refused_at > HORIZON_SECONDS:
            return 0.0
        return max(0.0, self._next_turn[_level(tokens, prompt_tokens)] - now)

    def take_turn(self, priority: int, tokens: float, prompt_tokens: float, rate: float, now: float, share: float = 1.0) -> None:
        """Give the next turn to a request, of whose tokens a share counts.

        The turns of a level have what requests that are as urgent, and of which more is cached, leave of `rate` tokens a second: at least
        STARVATION_SHARE of it.
        """
        level = _level(tokens, prompt_tokens)
        before = sum(value for (urgency, other), value in self._tokens.items() if urgency <= priority and other < level)
        if before and now - self._refused_at <= HORIZON_SECONDS:
            left = max(STARVATION_SHARE * rate, rate - before / HORIZON_SECONDS)
            self._next_turn[level] = max(now, self._next_turn[level]) + share * tokens / left


def _level(tokens: float, prompt_tokens: float) -> int:
    return min(LEVELS - 1, int(LEVELS * tokens / max(1.0, prompt_tokens)))
