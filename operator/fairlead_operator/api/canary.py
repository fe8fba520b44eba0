"""`spec.rollout.canary`: a new revision of the workers serves a part of the requests before it replaces the old revision."""

from typing import Annotated, Literal

from pydantic import Field

from fairlead_operator.api.fields import Part, Percentage, percentage


class Canary(Part):
    """How a new revision is tested, and the limits beyond which it is rolled back. A change of these fields restarts no pod."""

    traffic_percent: int = Field(10, ge=1, le=99, description="Percent of conversations whose requests go to the canary.")
    replicas: int = Field(1, ge=1, le=1000, description="Canary pods, in addition to spec.replicas.")
    promotion: Literal["Automatic", "Manual"] = Field(
        "Automatic",
        description="Automatic: after analysisSeconds. Manual: when promotedRevision names it.",
    )
    analysis_seconds: int = Field(600, ge=0, le=604_800, description="How long ready canaries are observed before automatic promotion.")
    min_requests: int = Field(
        100, ge=1, le=1_000_000, description="Requests that the canary must serve before it is promoted or rolled back."
    )
    max_error_rate_increase: Percentage = Field(
        "1%",
        description="Roll back when its failed requests exceed the old revision's by more than this.",
    )
    max_ttft_increase: Percentage = Field(
        "50%",
        description="Roll back when its TTFT (p50 or p90) exceeds the old revision's by more than this.",
    )
    promoted_revision: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9a-z-]+$")] | None = Field(
        None, description="Value of status.canary.revision to promote now, whatever was observed."
    )
    retry_token: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z:._+-]+$")] | None = Field(
        None, description="Any string. A change tests a rolled back revision again."
    )

    @property
    def is_manual(self) -> bool:
        return self.promotion == "Manual"

    @property
    def allowed_error_rate_increase(self) -> float:
        """Difference of the shares of failed requests, in 0..1."""
        return percentage(self.max_error_rate_increase)

    @property
    def allowed_ttft_ratio(self) -> float:
        """The canary's TTFT divided by the old revision's: `50%` → 1.5."""
        return 1 + percentage(self.max_ttft_increase)
