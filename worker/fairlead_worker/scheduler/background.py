"""Background prompts: those less urgent than requests that still arrive, such as the lines of a batch beside chats.

A step cannot be interrupted, so a request waits for the one in flight, and its own step takes longer with other prompts in it. Background
prompts therefore get smaller chunks, and no place in a larger step (`StepBudget`). Without more urgent requests they get whole steps.
"""

from bisect import bisect_left
from math import isfinite

from fairlead_worker.scheduler.chunk_sizer import ChunkSizer, PrefillBudget
from fairlead_worker.scheduler.stats import EngineStats

PREFILL_PER_DECODE = 4
"""Time of a background step's prefill, in decode steps. The time that every step takes is then a fifth of it."""
RECENT_STEPS = 256
"""Steps in which a more urgent request must have arrived. Steps while requests run: 256 of them take seconds on a GPU."""


class Urgency:
    """The last arrivals of each priority, as far as no more urgent request arrived after them."""

    def __init__(self) -> None:
        self._priorities: list[int] = []
        """Ascending."""
        self._steps: list[int] = []
        """When each of them last arrived. Ascending too: an earlier arrival of a less urgent request says nothing more."""

    def record(self, priority: int, step: int) -> None:
        """Record that a request arrived before this step."""
        old, at = bisect_left(self._steps, step - RECENT_STEPS), bisect_left(self._priorities, priority)
        self._priorities, self._steps = [*self._priorities[old:at], priority], [*self._steps[old:at], step]

    def is_background(self, priority: int, step: int) -> bool:
        """Return whether a more urgent request arrived recently."""
        at = bisect_left(self._priorities, priority)
        return at > 0 and step - self._steps[at - 1] <= RECENT_STEPS


def background_budget(stats: EngineStats, sizer: ChunkSizer | None, page_size: int, limit: int) -> PrefillBudget | None:
    """Return the prefill of a step beyond which no background prompt is added, at least a page. None: the step time is not known.

    `sizer`: knows the cost of attention, which grows with the position. `limit`: tokens.
    """
    seconds = PREFILL_PER_DECODE * stats.decode_seconds
    work, token = (0.0, stats.seconds_per_token) if sizer is None or not sizer.time.is_known else sizer.time.coefficients[:2]
    if not (seconds > 0 and isfinite(seconds) and work >= 0 and token >= 0 and isfinite(work + token) and work + token > 0):
        return None
    return PrefillBudget(seconds, page_size, limit, work, token)
