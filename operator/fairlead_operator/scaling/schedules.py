"""The minimum of workers that `spec.scaling.schedules` ask for at one moment. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

from cronsim import CronSim

from fairlead_operator.api.scaling import Scaling, Schedule


@dataclass(frozen=True)
class ScheduledMinimum:
    """`replicas`: 0 where no schedule is in effect. `ends_at`: seconds since the epoch when it may change; None: never."""

    replicas: int = 0
    schedule: str = ""
    ends_at: float | None = None


NO_MINIMUM = ScheduledMinimum()


def find_minimum(schedules: Iterable[Schedule], now: datetime) -> ScheduledMinimum:
    """Return the largest minimum in effect. `now`: with a time zone."""
    found, ends = NO_MINIMUM, []
    for one in schedules:
        start, end = _next(one.start, one.time_zone, now), _next(one.end, one.time_zone, now)
        ends.append(min(start, end))
        # Inside a period the end comes before the next start, as in KEDA's cron scaler.
        if end < start and one.min_replicas > found.replicas:
            found = ScheduledMinimum(one.min_replicas, one.name)
    return ScheduledMinimum(found.replicas, found.schedule, min(ends, default=None))


def raise_minimum(scaling: Scaling, minimum: ScheduledMinimum) -> Scaling:
    """Return the bounds while `minimum` is in effect."""
    if minimum.replicas <= scaling.min_replicas:
        return scaling
    return scaling.model_copy(update={"min_replicas": minimum.replicas})


def _next(expression: str, zone: str, now: datetime) -> float:
    """Return the next time after `now`, in seconds since the epoch.

    Where clocks go back, an hour comes twice. Cron runs in the first one, so in the second one its time may lie before `now`: skip it.
    """
    times = CronSim(expression, now.astimezone(ZoneInfo(zone)))
    return next(at for time in times if (at := time.timestamp()) > now.timestamp())
