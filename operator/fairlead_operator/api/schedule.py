"""`spec.scaling.schedules`: more workers at certain times, as two cron expressions in a time zone (the fields of KEDA's cron scaler)."""

from datetime import UTC, datetime
from typing import Annotated, Self
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from fairlead_operator.api.fields import ObjectName, Part, refuse

MAX_SCHEDULES = 16
# Cronsim also takes six fields, the first for seconds. Those of a CronJob are five.
Cron = Annotated[str, Field(min_length=9, max_length=128, pattern=r"^[-0-9A-Za-z*/,#]+( [-0-9A-Za-z*/,#]+){4}$")]


class Schedule(Part):
    """A minimum of workers from each `start` to the next `end`."""

    name: ObjectName = Field(description="Name of the schedule, for messages.")
    start: Cron = Field(description='When the minimum begins: minute, hour, day, month and day of week, such as "0 8 * * 1-5".')
    end: Cron = Field(description='When it ends, such as "0 18 * * 1-5".')
    time_zone: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,2}$")] = Field(
        "UTC", description="Time zone, such as Europe/Berlin."
    )
    min_replicas: int = Field(ge=1, le=1000, description="Fewest workers in that time. Of overlapping schedules the largest counts.")

    @model_validator(mode="after")
    def _computable(self) -> Self:
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
        return self
