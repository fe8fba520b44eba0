"""Background prompts: those less urgent than requests that still arrive, such as the lines of a batch beside chats.

A step cannot be interrupted, so a request waits for the one in flight, and its own step takes longer with other prompts in it. Background
prompts therefore get smaller chunks, and no place in a larger step (`StepBudget`, `EngineStats.background_tokens`). Without more urgent
requests they get whole steps.
"""

from bisect import bisect_left

RECENT_STEPS = 256
"""Steps in which a more urgent request must have arrived. Steps while requests run: 256 of them take seconds on a GPU."""


class Urgency:
    """The last arrivals of each priority, as far as no more urgent request arrived after them."""

    __slots__ = ("_priorities", "_steps")

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
