"""`spec.rollout`: how pods are replaced, and `canary`: how a new revision serves a part of the requests first."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fairlead_operator.api.fields import Part, Percentage, percentage, refuse, rule, ruled

_SURGE = "spec.rollout.surgeTimeoutSeconds must be at most spec.rollout.progressDeadlineSeconds: reduce the one or raise the other"
_REVISION = r"^([a-z]([-a-z0-9]*[a-z0-9])?-)?[0-9a-f]{10}$"


def _require_time(text: str) -> str:
    """Apply the format `date-time` of the CRD, which needs a time zone."""
    try:
        is_time = datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        is_time = False
    refuse(not is_time, f"spec.rollout.restartedAt must be a time with a zone, such as 2026-01-31T12:00:00Z (got {text!r})")
    return text


RestartTime = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"}), AfterValidator(_require_time)]


class Canary(Part):
    """How a new revision is tested before it replaces the old one, and the limits beyond which it is rolled back.

    A change of these fields restarts no pod.
    """

    traffic_percent: int = Field(10, ge=1, le=99, description="Percent of conversations whose requests go to the canary.")
    replicas: int = Field(1, ge=1, le=1000, description="Canary pods, in addition to spec.replicas.")
    promotion: Literal["Automatic", "Manual"] = Field(
        "Automatic", description="Automatic: after analysisSeconds. Manual: when promotedRevision names it."
    )
    analysis_seconds: int = Field(600, ge=0, le=604_800, description="How long ready canaries are observed before automatic promotion.")
    min_requests: int = Field(
        100, ge=1, le=1_000_000, description="Requests that the canary must serve before it is promoted or rolled back."
    )
    max_error_rate_increase: Percentage = Field(
        "1%", description="Roll back when its failed requests exceed the old revision's by more than this."
    )
    max_ttft_increase: Percentage = Field(
        "50%", description="Roll back when its TTFT (p50 or p90) exceeds the old revision's by more than this."
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


class Rollout(Part):
    """How pods are replaced."""

    model_config = ruled(rule("self.surgeTimeoutSeconds <= self.progressDeadlineSeconds", _SURGE, path=".surgeTimeoutSeconds"))

    strategy: Literal["Auto", "Surge", "DrainFirst"] = Field(
        "Auto",
        description="Surge: a new worker starts before an old one stops. DrainFirst: the reverse. "
        "Auto: Surge, or DrainFirst without a node for it.",
    )
    surge_timeout_seconds: int = Field(30, ge=0, le=86_400, description="How long strategy Auto waits for a new worker to be scheduled.")
    paused: bool = Field(False, description="Stops the replacement of pods. Scaling continues.")
    revision: Annotated[str, Field(min_length=10, max_length=96, pattern=_REVISION)] | None = Field(
        None, description="ControllerRevision to run (NAME-worker-DIGEST). Absent: that of the current spec."
    )
    restarted_at: RestartTime | None = Field(None, description="A change restarts the workers, as kubectl rollout restart does.")
    engine_version: Literal["Pinned", "Auto"] = Field(
        "Pinned", description="Pinned: new operator images reach pods with the next edit. Auto: in waves over all Auto services."
    )
    drain_timeout_seconds: int = Field(120, ge=0, le=7200, description="How long a terminating pod may take to complete its requests.")
    progress_deadline_seconds: int = Field(3600, ge=30, le=86_400, description="Time without progress until Progressing is False.")
    canary: Canary | None = Field(
        None, description="Tests new revisions with a part of the requests. Absent: they are rolled out directly."
    )

    def check_rules(self) -> None:
        given = f"{self.surge_timeout_seconds} is more than {self.progress_deadline_seconds}"
        refuse(self.surge_timeout_seconds > self.progress_deadline_seconds, f"{_SURGE} ({given})")
