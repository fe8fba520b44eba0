"""`spec.rollout`: how pods are replaced."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from fairlead_operator.api.canary import Canary
from fairlead_operator.api.fields import Duration, Part, refuse, rule, rules, seconds

_DRAIN = "spec.rollout.drainTimeout must be at most 2h: a node is not held up for longer"
_DEADLINE = "spec.rollout.progressDeadline must lie between 30s and 24h"
_SURGE = "spec.rollout.surgeTimeout must be at most spec.rollout.progressDeadline: a rollout that waits for room would be called stuck"
_REVISION = r"^([a-z]([-a-z0-9]*[a-z0-9])?-)?[0-9a-f]{10}$"


class Rollout(Part):
    """How pods are replaced."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("duration(self.surgeTimeout) <= duration(self.progressDeadline)", _SURGE, path=".surgeTimeout"))
    )

    strategy: Literal["Auto", "Surge", "DrainFirst"] = Field(
        "Auto",
        description="Surge: a new worker before an old one goes; DrainFirst: an old one goes first; "
        "Auto: Surge, and DrainFirst once a new worker finds no room for surgeTimeout.",
    )
    surge_timeout: Duration = Field("30s", description="How long Auto waits for room for a new worker.")
    paused: bool = Field(False, description="No further pod is replaced; scaling goes on.")
    revision: Annotated[str, Field(min_length=10, max_length=96, pattern=_REVISION)] | None = Field(
        None, description="Run the workers of this ControllerRevision (NAME-worker-DIGEST), whatever the rest of the spec says of them."
    )
    drain_timeout: Annotated[
        Duration,
        Field(json_schema_extra=rules(rule("duration(self) <= duration('2h')", _DRAIN))),
    ] = Field("120s", description="How long a pod that goes may finish its streams, such as 120s or 10m.")
    progress_deadline: Annotated[
        Duration,
        Field(
            json_schema_extra=rules(
                rule(
                    "duration(self) >= duration('30s') && duration(self) <= duration('24h')",
                    _DEADLINE,
                )
            )
        ),
    ] = Field("1h", description="Without progress for this long, condition Progressing is False with ProgressDeadlineExceeded.")
    canary: Canary | None = Field(
        None, description="A new revision is tried on a part of the requests first. Absent: it is rolled out at once."
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        refuse(seconds(self.drain_timeout) > 7200, f"{_DRAIN} (got {self.drain_timeout})")
        refuse(not 30 <= seconds(self.progress_deadline) <= 86400, f"{_DEADLINE} (got {self.progress_deadline})")
        refuse(seconds(self.surge_timeout) > seconds(self.progress_deadline), f"{_SURGE} (got {self.surge_timeout})")
        return self

    @property
    def drain_seconds(self) -> int:
        return round(seconds(self.drain_timeout))

    @property
    def deadline_seconds(self) -> int:
        return round(seconds(self.progress_deadline))

    @property
    def surge_seconds(self) -> float:
        return seconds(self.surge_timeout)
