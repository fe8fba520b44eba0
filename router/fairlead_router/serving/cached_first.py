"""Which prompts go first while requests are refused: those of which most is cached. Pure: the caller gives the time.

A refused turn of an admitted conversation wastes the KV of the turns before it, and leaves the next turn more to compute. So where demand
exceeds the capacity, the capacity goes to the prompts with the least uncached share: a bid price (Talluri and van Ryzin, 1998) on the
tokens computed for each token of prompt. docs/design/router/cached-first.md derives it. `fairlead simulate` runs the same code.
"""

import math
from typing import Final

from fairlead_router.serving.best_effort import STARVATION_SHARE
from fairlead_router.tenancy.tenants import LOWEST

HORIZON_SECONDS: Final = 4.0
"""Time constant of the measured demand, and time since the last refusal after which nothing is refused here."""
LEVELS: Final = 3
"""Levels of the uncached share: mostly cached, partly, mostly not. Prompts of one level do not go before each other. With 16 levels long
contexts go first, whose decodes are slow: on Zipf documents at 3 times capacity the goodput is 0.81 of that without this rule, with 3 it
is 1.09."""


class CachedFirst:
    """Demand of the recent requests, by priority and uncached share, and the turns of those that it refuses."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, int], float] = {}
        """Tokens to compute, each counted less the older it is. By priority and level; less urgent ones than LOWEST share an entry, because
        each request looks at all entries and a client without a key may send any number."""
        self._at = self._refused_at = -math.inf
        self._next_turn = -math.inf

    def record(self, priority: int, tokens: float, prompt_tokens: float, now: float) -> None:
        """Record a request that arrives for the first time. `tokens`: those of its prompt that no worker caches."""
        kept = math.exp((self._at - now) / HORIZON_SECONDS)
        self._tokens = {key: left for key, value in self._tokens.items() if (left := kept * value) >= 1.0}
        self._at = now
        key = min(priority, LOWEST), _level(tokens, prompt_tokens)
        self._tokens[key] = self._tokens.get(key, 0.0) + tokens

    def record_refusal(self, now: float) -> None:
        """Record that no worker could serve a request within its bounds."""
        self._refused_at = now

    def is_outbid(self, priority: int, tokens: float, prompt_tokens: float, rate: float, now: float) -> bool:
        """Return whether requests that are as urgent, and of which more is cached, need all of `rate` tokens a second.

        False unless requests were refused lately, so that a short burst that the queues can take refuses nothing.
        """
        if now - self._refused_at > HORIZON_SECONDS:
            return False
        level = _level(tokens, prompt_tokens)
        demand = sum(value for (urgency, other), value in self._tokens.items() if urgency <= priority and other < level)
        return demand >= rate * HORIZON_SECONDS

    def next_turn(self, now: float) -> float:
        """Return the seconds until the next request that is outbid has its turn, 0: now."""
        return max(0.0, self._next_turn - now)

    def take_turn(self, tokens: float, rate: float, now: float) -> None:
        """Give the next turn to a request. The turns have STARVATION_SHARE of the capacity."""
        self._next_turn = max(now, self._next_turn) + tokens / (STARVATION_SHARE * rate)


def _level(tokens: float, prompt_tokens: float) -> int:
    return min(LEVELS - 1, int(LEVELS * tokens / max(1.0, prompt_tokens)))
