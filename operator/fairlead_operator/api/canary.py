"""`spec.rollout.canary`: how a new revision of the workers is tried on a part of the requests before it replaces the old one."""

from typing import Annotated

from pydantic import Field

from fairlead_operator.api.fields import Part, seconds

MANUAL = "Manual"


class Canary(Part):
    """How a new revision is tried, and what it may cost. A change of these restarts nobody."""

    weight: int = Field(10, ge=1, le=99, description="Percent of the requests that are for the canary; whole conversations.")
    replicas: int = Field(1, ge=1, le=1000, description="Pods of the canary, beside spec.replicas.")
    pause: Annotated[str, Field(min_length=2, max_length=16, pattern=r"^(Manual|([0-9]+(ms|s|m|h))+)$")] = Field(
        "10m", description="How long it is judged, such as 10m, from when its pods are ready. Manual: until promote names it."
    )
    min_requests: int = Field(100, ge=1, le=1_000_000, description="Requests of the canary before anything is concluded.")
    max_error_rate: float = Field(
        0.01,
        ge=0,
        le=1,
        description="It is rolled back when its share of failed requests exceeds the old revision's by more, such as 0.01.",
    )
    max_ttft_ratio: float = Field(
        1.5,
        ge=1,
        le=100,
        description="It is rolled back when its p50 or p90 time to first token is more than this times the old revision's.",
    )
    promote: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9a-z-]+$")] | None = Field(
        None,
        description="The revision (of status.canary.revision) to promote now, whatever was judged. Other revisions are tried as always.",
    )
    retry: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z:._+-]+$")] | None = Field(
        None, description="Any value, such as the time: when it changes, a revision that was rolled back is tried again."
    )

    @property
    def manual(self) -> bool:
        return self.pause == MANUAL

    @property
    def pause_seconds(self) -> float:
        return 0.0 if self.manual else seconds(self.pause)
