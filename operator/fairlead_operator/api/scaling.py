"""`spec.scaling`: bounds of the number of workers, and the target of the operator's autoscaler."""

from datetime import UTC, datetime
from typing import Annotated
from zoneinfo import ZoneInfo

from pydantic import Field

from fairlead_operator.api.fields import ObjectName, Part, list_map, refuse, rule, ruled

_BOUNDS = "spec.scaling.minReplicas must be at most spec.scaling.maxReplicas: change one of the two"
_IDLE = (
    "spec.scaling.idleTimeoutSeconds scales to zero: set spec.scaling.target and spec.scaling.minReplicas 0, or remove idleTimeoutSeconds"
)
_SCALE_DOWN = "spec.scaling.scaleDown configures the operator's autoscaler: set spec.scaling.target, or remove scaleDown"
_SCHEDULE_BOUNDS = "spec.scaling.schedules: minReplicas must be at most spec.scaling.maxReplicas: change one of the two"
_SCHEDULE_NAMES = "spec.scaling.schedules must have different names: rename one of the two"
EXCLUSIVE = (
    "spec.replicas and spec.scaling.target both set the number of workers: remove one of them (kubectl scale, HPA and "
    "KEDA set spec.replicas)"
)
DEFAULT_IDLE_TIMEOUT_SECONDS, DEFAULT_STABILIZATION_WINDOW_SECONDS = 600, 300
MAX_SCHEDULES = 16
# Cronsim also takes six fields, the first for seconds. Those of a CronJob are five.
Cron = Annotated[str, Field(min_length=9, max_length=128, pattern=r"^[-0-9A-Za-z*/,#]+( [-0-9A-Za-z*/,#]+){4}$")]


class Target(Part):
    """The latency that the autoscaler holds."""

    ttft_milliseconds: int = Field(
        ge=1, le=3_600_000, description="Expected time to first token (TTFT) above which workers are added, such as 2000."
    )

    @property
    def seconds(self) -> float:
        return self.ttft_milliseconds / 1000


class ScaleDown(Part):
    """How workers are removed, as in a HorizontalPodAutoscaler."""

    stabilization_window_seconds: int = Field(
        DEFAULT_STABILIZATION_WINDOW_SECONDS, ge=0, le=3600, description="Workers are removed once fewer were enough for this long."
    )


class Schedule(Part):
    """A minimum of workers from each `start` to the next `end`: two cron expressions, the fields of KEDA's cron scaler."""

    name: ObjectName = Field(description="Name of the schedule, for messages.")
    start: Cron = Field(description='When the minimum begins: minute, hour, day, month and day of week, such as "0 8 * * 1-5".')
    end: Cron = Field(description='When it ends, such as "0 18 * * 1-5".')
    time_zone: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,2}$")] = Field(
        "UTC", description="Time zone, such as Europe/Berlin."
    )
    min_replicas: int = Field(ge=1, le=1000, description="Fewest workers in that time. Of overlapping schedules the largest counts.")

    def check_rules(self) -> None:
        from cronsim import CronSim, CronSimError  # imported late: commands that read no spec are installed without the operator's extra

        where = f"spec.scaling.schedules {self.name}"
        try:
            zone = ZoneInfo(self.time_zone)
        except (ValueError, OSError, KeyError):  # OSError: a folder of the database; KeyError: no such name
            refuse(True, f"{where}: timeZone {self.time_zone!r} is unknown: use a name such as Europe/Berlin")
        for field, expression in (("start", self.start), ("end", self.end)):
            try:
                next(CronSim(expression, datetime(2026, 1, 1, tzinfo=UTC).astimezone(zone)))
            except (CronSimError, StopIteration) as error:
                why = str(error) or "it never comes"
                refuse(True, f"{where}: {field} {expression!r} is not a cron expression such as '0 8 * * 1-5': {why}")


class Scaling(Part):
    """Bounds of the number of workers, and with `target` the operator's autoscaler."""

    model_config = ruled(
        rule("self.minReplicas <= self.maxReplicas", _BOUNDS, path=".minReplicas"),
        rule("!has(self.idleTimeoutSeconds) || (has(self.target) && self.minReplicas == 0)", _IDLE, path=".idleTimeoutSeconds"),
        rule("!has(self.schedules) || self.schedules.all(one, one.minReplicas <= self.maxReplicas)", _SCHEDULE_BOUNDS, path=".schedules"),
        rule("!has(self.scaleDown) || has(self.target)", _SCALE_DOWN, path=".scaleDown"),
    )

    min_replicas: int = Field(1, ge=0, le=1000, description="Fewest workers. With 0 and a target: zero after idleTimeoutSeconds.")
    max_replicas: int = Field(ge=1, le=1000, description="Most workers.")
    target: Target | None = Field(None, description="The operator scales to hold this. Absent: spec.replicas sets the number.")
    idle_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = Field(
        None, description="With minReplicas 0: time without requests before scale to zero. Absent: 600."
    )
    scale_down: ScaleDown | None = Field(None, description="How the operator's autoscaler removes workers.")
    schedules: list[Schedule] = Field(
        default_factory=list,
        max_length=MAX_SCHEDULES,
        description="More workers at certain times. Outside of them minReplicas counts.",
        json_schema_extra=list_map("name"),
    )

    def check_rules(self) -> None:
        refuse(self.min_replicas > self.max_replicas, f"{_BOUNDS} ({self.min_replicas} > {self.max_replicas})")
        refuse(self.idle_timeout_seconds is not None and (self.target is None or self.min_replicas > 0), _IDLE)
        refuse(self.scale_down is not None and self.target is None, _SCALE_DOWN)
        over = next((one for one in self.schedules if one.min_replicas > self.max_replicas), None)
        refuse(over is not None, f"{_SCHEDULE_BOUNDS} ({over.name}: {over.min_replicas} > {self.max_replicas})" if over else "")
        refuse(len({one.name for one in self.schedules}) < len(self.schedules), _SCHEDULE_NAMES)

    @property
    def idle_seconds(self) -> float | None:
        """Seconds without a request after which the service scales to zero; None: never."""
        if self.target is None or self.min_replicas > 0:
            return None
        return self.idle_timeout_seconds or DEFAULT_IDLE_TIMEOUT_SECONDS

    @property
    def stable_seconds(self) -> float:
        """The stabilization window in seconds."""
        return DEFAULT_STABILIZATION_WINDOW_SECONDS if self.scale_down is None else self.scale_down.stabilization_window_seconds

    def within(self, workers: int) -> int:
        """Return the nearest number that the bounds allow."""
        return max(self.min_replicas, min(self.max_replicas, workers))
