"""Tokens a second and the share found in caches, from what one router says of all workers; and when that is worth writing. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairlead_operator.api.traffic import TrafficStatus
from fairlead_operator.observed import TrafficSeen

APART = 60.0  # seconds between two writes
CHANGE = 0.1  # of what was written: less is not written
SHORTEST = 10.0  # seconds: over less than that a rate says nothing

_Counts = tuple[int, int, int]  # prompt tokens, cached of these, tokens generated


@dataclass(frozen=True)
class Look:
    """The workers' counters at one moment of a steady clock (seconds)."""

    at: float
    workers: Mapping[str, _Counts]

    @classmethod
    def of(cls, page: Mapping[str, Any], at: float) -> "Look | None":
        """From a router's `/fairlead/workers`; None where a ready worker has no counters (of an older release): a part is no measure."""
        found = {}
        for worker in page["workers"]:
            load = worker.get("load") or {}
            if load.get("output_tokens") is not None:
                found[str(worker.get("pod") or worker["address"])] = (load["prompt_tokens"], load["cached_tokens"], load["output_tokens"])
            elif worker.get("ready"):
                return None
        return cls(at, found)


def between(first: Look, last: Look) -> TrafficSeen | None:
    """What went through from one look to the other; None where they are too near. A worker that has begun anew counts from 0; one that the
    first look did not show counts from the next one on, since the router may only now have met it."""
    seconds = last.at - first.at
    if seconds < SHORTEST:
        return None
    prompt = cached = output = 0
    for name, now in last.workers.items():
        before = first.workers.get(name, now)
        since = (0, 0, 0) if any(old > new for old, new in zip(before, now, strict=True)) else before
        prompt, cached, output = prompt + now[0] - since[0], cached + now[1] - since[1], output + now[2] - since[2]
    return TrafficSeen(_two_digits(output / seconds), _two_digits(prompt / seconds), round(100 * cached / prompt) if prompt else None)


def said(
    before: TrafficStatus | None, seen: TrafficSeen | None, now: datetime, *, serving: bool = True
) -> tuple[TrafficStatus | None, float | None]:
    """What to write, and when that may be another (seconds since the epoch; None: only when something else is seen). Not `serving`: no
    worker is ready, so nothing goes through, whoever can be asked."""
    if not serving and before is not None:
        seen = TrafficSeen(0, 0, None)
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
        next_at = datetime.fromisoformat(before.last_update_time).timestamp() + APART
        if now.timestamp() < next_at:
            return before, next_at
    return (
        TrafficStatus(
            tokens_per_second=seen.tokens_per_second,
            prompt_tokens_per_second=seen.prompt_tokens_per_second,
            cache_hit_percent=percent,
            last_update_time=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        ),
        None,
    )


def _differs(old: int, new: int) -> bool:
    return abs(new - old) > CHANGE * max(old, new)


def _percent_differs(old: int | None, new: int | None) -> bool:
    return new is not None and (old is None or abs(new - old) > 100 * CHANGE)


def _two_digits(rate: float) -> int:
    """12,345 is 12,000: what is written is rounded as coarsely as it is compared."""
    return int(float(f"{rate:.2g}")) if rate >= 100 else round(rate)
