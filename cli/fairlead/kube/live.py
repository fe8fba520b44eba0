"""The current state of a service's routers, read through the API server's pod proxy, so that no port has to be forwarded."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairlead.errors import UserError
from fairlead_operator import names
from fairlead_operator.objects import component_of

Body = Mapping[str, Any]
Read = Callable[[str, str], str]  # pod, path → the text; raises UserError

NO_ROUTER = "no router is ready"
SHOWN = 5
_START_SECONDS = 30.0
"""Records of starting workers are ignored for a shorter time."""
_FORGED = "; if this lasts, another client of Redis may be forging records: rotate the service's Redis credentials"
_WHY = {
    "unknown_address": "discovery does not name this address: its pod is starting or gone",
    "other_incarnation": "the worker there reports another incarnation: it is joining the index again",
}
_WAITING = "fairlead_router_queued_requests"  # includes held requests


@dataclass(frozen=True)
class Live:
    """The state of one service's routers at one moment."""

    workers: Mapping[str, Body] = field(default_factory=dict)  # pod → its entry in `/fairlead/workers`
    queued: int | None = None  # requests that wait in the routers; None: not known
    index: str = ""
    ignored: Sequence[Body] = ()  # records of the index that the router does not use
    problem: str = ""  # why no live state is known


def read_routers(pods: Iterable[Body], read: Read) -> Live:
    """Return the workers as the first ready router sees them, and the requests that wait in all routers. Errors go to `problem`."""
    routers = sorted(pod["metadata"]["name"] for pod in pods if component_of(pod) == names.ROUTER and is_ready(pod))
    if not routers:
        return Live(problem=NO_ROUTER)
    try:
        page = workers_page(read(routers[0], "fairlead/workers"))
    except UserError as error:
        return Live(problem=str(error))
    waiting: list[int] = []
    for router in routers:
        try:
            waiting.append(round(metric(read(router, "metrics"), _WAITING)))
        except UserError:
            break  # without every router the sum would be too small
    workers = {str(one.get("pod") or one.get("address")): one for one in page["workers"]}
    queued = sum(waiting) if len(waiting) == len(routers) else None
    return Live(workers, queued, str(page.get("index") or ""), page.get("ignored_records") or ())


def ignored_lines(records: Sequence[Body]) -> list[str]:
    """Return lines that say why a router ignores index records and what to check, for the first few records."""
    lines = []
    for one in records[:SHOWN]:
        why = _WHY.get(str(one.get("reason")), "not trusted")
        seconds = float(one.get("seconds", 0))
        lasts = _FORGED if seconds >= _START_SECONDS else ""
        lines.append(f"index record of {one.get('address', '?')} ignored for {seconds:.0f} s: {why}{lasts}")
    if len(records) > SHOWN:
        lines.append(f"{len(records) - SHOWN} more index records are ignored: a router's /fairlead/workers lists them")
    return lines


def workers_page(text: str) -> dict[str, Any]:
    """Parse a router's `/fairlead/workers`. Raises UserError for an answer of another program."""
    try:
        page = json.loads(text)
    except ValueError:
        page = None
    if not isinstance(page, dict) or not isinstance(page.get("workers"), list):
        raise UserError("not a Fairlead router's answer")
    return page


def metric(text: str, name: str) -> float:
    """Return the value of a metric without labels. Raises UserError if it is missing."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return float(value)
    raise UserError(f"no metric {name}")


def is_ready(pod: Body) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    going = pod["metadata"].get("deletionTimestamp")
    return not going and any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
