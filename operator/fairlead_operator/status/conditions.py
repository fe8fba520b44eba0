"""Conditions that keep the time of their last transition."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from fairlead_operator.api.status import Condition
from fairlead_operator.objects import format_time

Verdict = tuple[bool, str, str]
"""Truth, reason and message of a condition."""


def find(conditions: Sequence[Condition], type_: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == type_), None)


class Conditions:
    """The new conditions of one service, built beside the previous ones."""

    def __init__(self, before: Sequence[Condition], generation: int, now: datetime) -> None:
        self._before = before
        self._generation = generation
        self._now = format_time(now)
        self.items: list[Condition] = []

    def set(self, type_: str, truth: bool, reason: str, message: str = "", *, generation: int | None = None) -> None:
        """Set a condition. `generation`: the one that it describes, if not the present one."""
        status: Literal["True", "False"] = "True" if truth else "False"
        old = find(self._before, type_)
        since = old.last_transition_time if old is not None and old.status == status and old.last_transition_time else self._now
        self.items.append(
            Condition(
                type=type_,
                status=status,
                observed_generation=self._generation if generation is None else generation,
                last_transition_time=since,
                reason=reason or "Unknown",  # the API requires a reason
                message=message[:2048],
            )
        )

    def keep(self, type_: str, *, before: int | None = None) -> None:
        """Keep the previous condition, with the generation that it describes. `before`: that generation is to be an earlier one."""
        old = find(self._before, type_)
        if old is not None and before is not None and old.observed_generation >= before:
            old = old.model_copy(update={"observed_generation": max(0, before - 1)})
        if old is not None:
            self.items.append(old)
