"""What a rollout does now: the outcome of `strategy.next_step`, and the input of the children and of the status."""

from dataclasses import dataclass
from typing import Any

from fairlead_operator.causes import Cause

SURGE: dict[str, Any] = {"maxSurge": 1, "maxUnavailable": 0}
DRAIN: dict[str, Any] = {"maxSurge": 0, "maxUnavailable": 1}


@dataclass(frozen=True)
class Step:
    """Derived anew in every pass from the service and its children."""

    revision: str  # of the workers' template
    surge: bool = True  # a new worker before an old one goes
    paused: bool = False  # the workers' Deployment exists and replaces no pod
    activity: str = ""  # in words, for the Progressing condition
    problem: Cause | None = None  # the revision that is asked for is not there
    capacity_expected: bool = False  # a worker without a node is no fault yet: room is being made
    wake_at: float | None = None  # seconds since the epoch at which a wait for room ends
    in_use: frozenset[str] = frozenset()  # revisions that pods run: their templates are kept

    @property
    def strategy(self) -> dict[str, Any]:
        """`rollingUpdate` of the workers' Deployment."""
        return SURGE if self.surge else DRAIN
