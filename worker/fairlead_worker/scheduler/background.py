"""Background prompts: those less urgent than requests that still arrive, such as the lines of a batch beside chats.

A step cannot be interrupted, so a request waits for the one in flight, and its own step takes longer with other prompts in it. Background
prompts therefore get smaller chunks, and no place in a larger step (`StepBudget`, `EngineStats.efficient_tokens`). Without more urgent
requests they get whole steps.
"""

RECENT_STEPS = 256
"""Steps in which a more urgent request must have arrived. They take some seconds."""


class Urgency:
    """The most urgent priority of the recent requests."""

    __slots__ = ("_priority", "_step")

    def __init__(self) -> None:
        self._priority = 0
        self._step = -RECENT_STEPS - 1

    def record(self, priority: int, step: int) -> None:
        """Record that a request arrived before this step."""
        if priority <= self._priority or not self._is_recent(step):
            self._priority, self._step = priority, step

    def is_background(self, priority: int, step: int) -> bool:
        """Return whether a more urgent request arrived recently."""
        return priority > self._priority and self._is_recent(step)

    def _is_recent(self, step: int) -> bool:
        return step - self._step <= RECENT_STEPS
