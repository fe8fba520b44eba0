"""The revisions that run side by side during a canary: built by the rollout, read by the children."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_common.canary_split import Split
from fairlead_operator.revisions import NO_FAILURE, CanaryFailure

NO_SPLIT = Split()


@dataclass(frozen=True)
class Sides:
    """The revisions that run side by side."""

    stable: str = ""  # the revision that the main Deployment keeps; empty: the wanted one, with or without a canary
    live: Mapping[str, Any] | None = None  # its present template, in case its ControllerRevision is gone
    replicas: int | None = None  # of the canary; None: there is none
    split: Split = NO_SPLIT  # the split for the routers
    failure: CanaryFailure = NO_FAILURE  # how the wanted revision was rolled back; stored on its ControllerRevision


STABLE_ONLY = Sides()
