"""`spec.scaling`: bounds of the number of workers, and what the operator's own autoscaler is to reach within them."""

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from fairlead_operator.api.fields import Duration, Part, refuse, rule, rules, seconds

_BOUNDS = "spec.scaling.min must be at most spec.scaling.max"
_TTFT = "spec.scaling.target.ttft must be above 0s"
_IDLE = "spec.scaling.idleAfter takes the last worker away: set spec.scaling.target and spec.scaling.min 0, or remove it"
_STABLE = "spec.scaling.scaleDownStabilization is for the operator's own autoscaler: set spec.scaling.target, or remove it"
_IDLE_RANGE = "spec.scaling.idleAfter must lie between 1s and 24h"
_STABLE_RANGE = "spec.scaling.scaleDownStabilization must be at most 1h"
EXCLUSIVE = (
    "spec.replicas and spec.scaling.target decide the same: remove spec.replicas, and no kubectl scale, HPA or KEDA for this service; "
    "or remove spec.scaling.target"
)
IDLE_AFTER, STABILIZATION = "10m", "5m"


def _bounded(expression: str, message: str) -> Any:
    return Field(json_schema_extra=rules(rule(expression, message)))


class Target(Part):
    """What the autoscaler is to hold."""

    ttft: Annotated[Duration, _bounded("duration(self) > duration('0s')", _TTFT)] = Field(
        description="Expected time to first token, such as 2s: beyond it there are too few workers."
    )

    @property
    def seconds(self) -> float:
        return seconds(self.ttft)


class Scaling(Part):
    """Bounds that nobody can leave, and with `target` the operator's own autoscaler."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.min <= self.max", _BOUNDS, path=".min"),
            rule("!has(self.idleAfter) || (has(self.target) && self.min == 0)", _IDLE, path=".idleAfter"),
            rule("!has(self.scaleDownStabilization) || has(self.target)", _STABLE, path=".scaleDownStabilization"),
        )
    )

    min: int = Field(1, ge=0, le=1000, description="Never fewer workers than this. 0 with target: none after idleAfter without a request.")
    max: int = Field(ge=1, le=1000, description="Never more workers than this.")
    target: Target | None = Field(None, description="The operator decides how many workers there are. Absent: spec.replicas does.")
    idle_after: (
        Annotated[Duration, _bounded("duration(self) >= duration('1s') && duration(self) <= duration('24h')", _IDLE_RANGE)] | None
    ) = Field(None, description="With min 0: how long without a request until no worker is kept. Absent: 10m.")
    scale_down_stabilization: Annotated[Duration, _bounded("duration(self) <= duration('1h')", _STABLE_RANGE)] | None = Field(
        None, description="For how long fewer workers must have been enough until there are fewer. Absent: 5m."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self.min > self.max, f"{_BOUNDS}: {self.min} > {self.max}")
        refuse(self.target is not None and seconds(self.target.ttft) <= 0, _TTFT)
        refuse(self.idle_after is not None and (self.target is None or self.min > 0), _IDLE)
        refuse(self.scale_down_stabilization is not None and self.target is None, _STABLE)
        refuse(self.idle_after is not None and not 1 <= seconds(self.idle_after) <= 86400, f"{_IDLE_RANGE} (got {self.idle_after})")
        stable = self.scale_down_stabilization
        refuse(stable is not None and seconds(stable) > 3600, f"{_STABLE_RANGE} (got {stable})")
        return self

    @property
    def idle_seconds(self) -> float | None:
        """Seconds without a request after which no worker is kept; None: never."""
        return seconds(self.idle_after or IDLE_AFTER) if self.target is not None and self.min == 0 else None

    @property
    def stable_seconds(self) -> float:
        return seconds(self.scale_down_stabilization or STABILIZATION)

    def within(self, workers: int) -> int:
        """The nearest number that the bounds allow."""
        return max(self.min, min(self.max, workers))
