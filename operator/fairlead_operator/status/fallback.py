"""Workers that run without CUDA graphs or overlap because these failed at their start: a fault of condition Degraded. Pure.

Such a worker serves right tokens, more slowly. So it never makes Ready False.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fairlead_operator.api import ServiceStatus
from fairlead_operator.causes import Cause
from fairlead_operator.causes.cause import make_cause
from fairlead_operator.objects import Body, ready_at
from fairlead_operator.status.conditions import find

REASON = "WorkerFallback"
ADVICE = (
    "The worker's log has the error. To accept it without a trial, set --max-cudagraph-capture-size=0 or --overlap=off in spec.engine.args"
)


def parse_router_page(page: Mapping[str, Any]) -> dict[str, str]:
    """Return pod -> reason from a router's `/fairlead/workers`; routers and workers of earlier releases report none."""
    return {str(one.get("pod") or one["address"]): str(one["fallback"]) for one in page["workers"] if one.get("fallback")}


def find_fault(before: ServiceStatus, pods: Iterable[Body], fallbacks: Mapping[str, str] | None) -> Cause | None:
    """Return the fault, which names one pod, always the first. Before the first answer of a router, the previous fault stays."""
    if fallbacks is None:
        old = find(before.conditions, "Degraded")
        return Cause(REASON, old.message, fault=True) if old is not None and old.status == "True" and old.reason == REASON else None
    ready = {str(pod["metadata"]["name"]) for pod in pods if ready_at(pod) is not None}
    found = sorted(ready & fallbacks.keys())
    if not found:
        return None
    share = "One worker serves" if len(found) == 1 else f"{len(found)} workers serve"
    return make_cause(REASON, f"{share} more slowly. Pod {found[0]}: {fallbacks[found[0]]}", ADVICE)
