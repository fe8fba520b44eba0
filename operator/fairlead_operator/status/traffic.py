"""Tokens per second and cache hit rate, from one router's report on all workers, and when to write them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairlead_operator.api.status import TrafficStatus
from fairlead_operator.objects import format_time
from fairlead_operator.observed import ObservedTraffic

MIN_INTERVAL = 60.0  # seconds between two writes
MIN_CHANGE = 0.1  # relative to the written value: a smaller change is not written
MIN_SECONDS = 10.0  # seconds: a rate over a shorter time is meaningless

_Counts = tuple[int, int, int]  # prompt tokens, cached prompt tokens, generated tokens


@dataclass(frozen=True)
class CounterSnapshot:
    """The workers' counters at one moment of a monotonic clock (seconds)."""

    at: float
    workers: Mapping[str, _Counts]

    @classmethod
    def parse(cls, page: Mapping[str, Any], at: float) -> "CounterSnapshot | None":
        """Read a router's `/fairlead/workers`. Returns None where a ready worker of an older release reports no counters."""
        found = {}
        for worker in page["workers"]:
            load = worker.get("load") or {}
            if load.get("output_tokens") is not None:
                found[str(worker.get("pod") or worker["address"])] = (load["prompt_tokens"], load["cached_tokens"], load["output_tokens"])
            elif worker.get("ready"):
                return None
        return cls(at, found)


def measure_traffic(first: CounterSnapshot, last: CounterSnapshot) -> ObservedTraffic | None:
    """Return the traffic between two snapshots; None where they are too close.

    A restarted worker counts from 0. A worker that is missing in the first snapshot counts from the next one on, since the router may only
    now have discovered it.
    """
    seconds = last.at - first.at
    if seconds < MIN_SECONDS:
        return None
    prompt = cached = output = 0
    for name, now in last.workers.items():
        before = first.workers.get(name, now)
        since = (0, 0, 0) if any(old > new for old, new in zip(before, now, strict=True)) else before
        prompt, cached, output = prompt + now[0] - since[0], cached + now[1] - since[1], output + now[2] - since[2]
    return ObservedTraffic(_two_digits(output / seconds), _two_digits(prompt / seconds), round(100 * cached / prompt) if prompt else None)


def build_status(
    before: TrafficStatus | None, seen: ObservedTraffic | None, now: datetime, *, serving: bool = True
) -> tuple[TrafficStatus | None, float | None]:
    """Return the new status, and when another may be due (seconds since the epoch; None: only when other traffic is observed).

    Not `serving`: no worker is ready, so the traffic is zero, whether or not a router answers.
    """
    if not serving and before is not None:
        seen = ObservedTraffic(0, 0, None)
    if seen is None:
        return before, None
    old = before or TrafficStatus()
    percent = old.cache_hit_percent if seen.cache_hit_percent is None else seen.cache_hit_percent
    if not (
        _differs(old.tokens_per_second, seen.tokens_per_second)
        or _differs(old.prompt_tokens_per_second, seen.prompt_tokens_per_second)
        or _percent_differs(old.cache_hit_percent, percent)
    ):
        return before, None
    if before is not None and before.last_update_time:
        next_at = datetime.fromisoformat(before.last_update_time).timestamp() + MIN_INTERVAL
        if now.timestamp() < next_at:
            return before, next_at
    return (
        TrafficStatus(
            tokens_per_second=seen.tokens_per_second,
            prompt_tokens_per_second=seen.prompt_tokens_per_second,
            cache_hit_percent=percent,
            last_update_time=format_time(now),
        ),
        None,
    )


def _differs(old: int, new: int) -> bool:
    return abs(new - old) > MIN_CHANGE * max(old, new)


def _percent_differs(old: int | None, new: int | None) -> bool:
    return new is not None and (old is None or abs(new - old) > 100 * MIN_CHANGE)


def _two_digits(rate: float) -> int:
    """Round to two digits, as coarsely as values are compared: 12,345 becomes 12,000."""
    return int(float(f"{rate:.2g}")) if rate >= 100 else round(rate)
