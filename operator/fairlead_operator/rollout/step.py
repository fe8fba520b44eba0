"""The present step of a rollout, and the revisions beside each other during a canary: inputs of the children and the status."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_common.canary_split import Split
from fairlead_operator.causes import Cause
from fairlead_operator.revisions import NO_FAILURE, CanaryFailure

SURGE: dict[str, Any] = {"maxSurge": 1, "maxUnavailable": 0}
DRAIN: dict[str, Any] = {"maxSurge": 0, "maxUnavailable": 1}
NO_SPLIT = Split()


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


@dataclass(frozen=True)
class Sides:
    """The revisions that run side by side."""

    stable: str = ""  # the revision that the main Deployment keeps; empty: the wanted one, with or without a canary
    live: Mapping[str, Any] | None = None  # its present template, in case its ControllerRevision is gone
    replicas: int | None = None  # of the canary; None: there is none
    split: Split = NO_SPLIT  # the split for the routers
    failure: CanaryFailure = NO_FAILURE  # how the wanted revision was rolled back; stored on its ControllerRevision


STABLE_ONLY = Sides()
