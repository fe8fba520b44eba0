"""Which revisions run beside each other while a canary is tried: made by the rollout, read by the children."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlead_common.canary_split import Split
from fairlead_operator.revisions import NO_FAILURE, CanaryFailure

NO_SPLIT = Split()


@dataclass(frozen=True)
class Sides:
    """Which revisions run beside each other."""

    stable: str = ""  # the revision that the main Deployment stays on; empty: the wanted one, whether a canary is still there or not
    live: Mapping[str, Any] | None = None  # what it runs now: its template, should its ControllerRevision be gone
    replicas: int | None = None  # of the canary; None: there is none
    split: Split = NO_SPLIT  # what the routers are told
    failure: CanaryFailure = NO_FAILURE  # how the wanted revision was rolled back: remembered on its ControllerRevision


ONE_SIDE = Sides()
