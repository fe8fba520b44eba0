"""The present step of a rollout: the result of `strategy.next_step`, and an input of the children and the status."""

from dataclasses import dataclass
from typing import Any

from fairlead_operator.causes import Cause

SURGE: dict[str, Any] = {"maxSurge": 1, "maxUnavailable": 0}
DRAIN: dict[str, Any] = {"maxSurge": 0, "maxUnavailable": 1}


@dataclass(frozen=True)
class Step:
    """Computed in every reconcile from the service and its children."""

    revision: str  # of the workers' template
    surge: bool = True  # start a new worker before an old one is deleted
    paused: bool = False  # the workers' Deployment exists and replaces no pod
    activity: str = ""  # for the message of the Progressing condition
    problem: Cause | None = None  # the requested revision does not exist
    capacity_expected: bool = False  # a pending worker is no fault yet: capacity is being freed
    wake_at: float | None = None  # seconds since the epoch when the wait for capacity ends
    in_use: frozenset[str] = frozenset()  # revisions that pods run: their templates are kept

    @property
    def strategy(self) -> dict[str, Any]:
        """`rollingUpdate` of the workers' Deployment."""
        return SURGE if self.surge else DRAIN
