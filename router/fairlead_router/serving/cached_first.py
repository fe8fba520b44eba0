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

_Key = tuple[int, int]
"""Priority and level."""


class CachedFirst:
    """Demand of the recent requests, by priority and uncached share, and the turns of those of which less is cached.

    A level's turns have what requests that are as urgent, and of which more is cached, leave of `rate` tokens a second.
    """

    def __init__(self) -> None:
        self._tokens: dict[_Key, float] = {}
        """Tokens to compute, each counted less the older it is."""
        self._at = self._refused_at = self._drained_at = -math.inf
        self._owed: dict[_Key, float] = {}
        """Tokens of the turns taken, less those computed since. Times would not do: turns come sooner once better cached demand ends."""

    def record(self, priority: int, tokens: float, prompt_tokens: float, now: float) -> None:
        """Record a request that arrives for the first time. `tokens`: those of its prompt to compute."""
        kept = math.exp((self._at - now) / HORIZON_SECONDS)
        self._tokens = {key: left for key, value in self._tokens.items() if (left := kept * value) >= 1.0}
        self._at = now
        key = _key(priority, tokens, prompt_tokens)
        self._tokens[key] = self._tokens.get(key, 0.0) + tokens

    def record_refusal(self, now: float) -> None:
        """Record that no worker could serve a request within its bounds."""
        self._refused_at = now

    def next_turn(self, priority: int, tokens: float, prompt_tokens: float, rate: float, now: float) -> float:
        """Return the seconds until a request's turn, after those that are as urgent, 0: now.

        0 unless requests were refused lately, so that a short burst that the queues can take refuses nothing.
        """
        self._drain(rate, now)
        own, level = _key(priority, tokens, prompt_tokens)
        owed = sum(value for (urgency, other), value in self._owed.items() if urgency <= own and other == level)
        return owed / self._left(self._before(own, level), rate, now)

    def take_turn(self, priority: int, tokens: float, prompt_tokens: float, rate: float, now: float, share: float = 1.0) -> None:
        """Give the next turn to a request, of whose tokens a share counts."""
        self._drain(rate, now)
        key = _key(priority, tokens, prompt_tokens)
        if self._left(self._before(*key), rate, now) < math.inf:
            self._owed[key] = self._owed.get(key, 0.0) + share * tokens

    def _before(self, priority: int, level: int) -> float:
        """Return the demand that goes before a level's turns, in tokens."""
        return sum(value for (urgency, other), value in self._tokens.items() if urgency <= priority and other < level)

    def _left(self, before: float, rate: float, now: float) -> float:
        """Return the tokens a second for turns: at least STARVATION_SHARE of `rate`, infinity if nothing goes before them."""
        if not before or now - self._refused_at > HORIZON_SECONDS:
            return math.inf
        return max(STARVATION_SHARE * rate, rate - before / HORIZON_SECONDS)

    def _drain(self, rate: float, now: float) -> None:
        """Subtract what was computed since the last call, the most urgent first."""
        seconds, self._drained_at = now - self._drained_at, now
        if not seconds or not self._owed:
            return
        before, computed, owed = [0.0] * LEVELS, [0.0] * LEVELS, {}
        for key in sorted(self._tokens.keys() | self._owed.keys()):  # so `before` is complete for each
            _, level = key
            for other in range(level + 1, LEVELS):
                before[other] += self._tokens.get(key, 0.0)
            tokens = self._owed.get(key, 0.0)
            done = min(tokens, max(0.0, self._left(before[level], rate, now) * seconds - computed[level]))
            computed[level] += done
            if tokens > done:
                owed[key] = tokens - done
        self._owed = owed


def _key(priority: int, tokens: float, prompt_tokens: float) -> _Key:
    """Return the request's entry. Priorities beyond LOWEST share one, because each request looks at all entries."""
    return max(-LOWEST, min(priority, LOWEST)), min(LEVELS - 1, int(LEVELS * tokens / max(1.0, prompt_tokens)))
