"""`status.index`: the state of the prefix index, and since when. Pure.

Routers serve without an index, so it never makes Ready False. When it stays unavailable, condition Degraded reports it: prompts are
prefilled again.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from fairlead_operator import names
from fairlead_operator.api.status import IndexStatus
from fairlead_operator.causes import Cause
from fairlead_operator.objects import Body, component_of, format_time, ready_at
from fairlead_operator.observed import ObservedIndex, ObservedRedis

UNAVAILABLE_GRACE = 120.0  # seconds: a Redis that fails over, or moves to another node, is back by then
STEP = 10  # percent
MIN_ANSWERS = 16  # of one worker; the router uses the same minimum to judge the index
_STATES = {"ok": "Available", "unavailable": "Unavailable", "off": "Disabled", "unused": "Unused"}


def parse_router_page(page: Mapping[str, Any]) -> ObservedIndex:
    """Return the index as a router's `/fairlead/workers` shows it. Raises KeyError, TypeError or AttributeError for another page."""
    wrong = [one["prediction"] for one in page["workers"] if (one.get("prediction") or {}).get("answers", 0) >= MIN_ANSWERS]
    return ObservedIndex(
        state=_STATES.get(page["index"], "Unknown"),
        reason=str(page.get("index_reason") or ""),
        read={"mirror": "Mirror", "remote": "Remote"}.get(page.get("index_read") or "", ""),
        error_percent=max((min(100, round(100 * max(one["over"], one["under"]))) for one in wrong), default=None),
    )


def build_status(
    before: IndexStatus | None, seen: ObservedIndex | None, routers_ready: int, now: datetime, redis: ObservedRedis | None = None
) -> IndexStatus | None:
    """Return the new status. Before the first answer, as after a restart, the previous one stays."""
    if routers_ready == 0:
        return None
    credentials, why = (before.credentials, before.credentials_message) if before is not None else (None, "")
    if redis is not None and redis.state:
        credentials, why = redis.state, redis.reason[:512]
    if seen is None:
        return before and before.model_copy(update={"credentials": credentials, "credentials_message": why})
    same = before is not None and before.state == seen.state
    return IndexStatus.model_validate(
        {
            "state": seen.state,
            "last_transition_time": before.last_transition_time if before is not None and same else format_time(now),
            "read_mode": seen.read or None,
            "message": seen.reason[:512],
            "credentials": credentials,
            "credentials_message": why,
            "prediction_error_percent": _round_percent(before.prediction_error_percent if before is not None else None, seen.error_percent),
        }
    )


def _round_percent(before: int | None, percent: int | None) -> int | None:
    """Round to tens, and keep the previous value until it is off by a whole ten: otherwise a value between two would be written often."""
    if percent is None or (before is not None and abs(percent - before) < STEP):
        return None if percent is None else before
    return STEP * round(percent / STEP)


def find_fault(index: IndexStatus | None, now: datetime) -> tuple[Cause | None, float | None]:
    """Return the fault, if there is one, and otherwise when there may be one (seconds since the epoch)."""
    if index is None or index.state != "Unavailable":
        return None, None
    long_at = datetime.fromisoformat(index.last_transition_time).timestamp() + UNAVAILABLE_GRACE
    if now.timestamp() < long_at:
        return None, long_at
    return Cause(
        "IndexUnavailable",
        f"Requests are routed by load since {index.last_transition_time}. Check that Redis runs, and its Secret: {index.message}",
        fault=True,
    ), None


def choose_router(pods: Iterable[Body]) -> str:
    """Return the address of one ready router; empty: none is ready.

    It is always the same router: two that differ slightly would be written in turn.
    """
    return next(iter(ready_routers(pods)), "")


def ready_routers(pods: Iterable[Body]) -> tuple[str, ...]:
    """Return the admin addresses (host:port) of the ready routers, ordered by their pods' names."""
    found = []
    for pod in pods:
        metadata, address = pod.get("metadata") or {}, (pod.get("status") or {}).get("podIP")
        is_router = component_of(pod) == names.ROUTER and ready_at(pod) is not None
        if is_router and address and not metadata.get("deletionTimestamp"):
            found.append((metadata.get("name", ""), address))
    return tuple(names.host_port(address, names.ROUTER_ADMIN_PORT) for _, address in sorted(found))
