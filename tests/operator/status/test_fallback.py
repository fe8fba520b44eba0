"""A worker without CUDA graphs or overlap is a fault of Degraded that names its pod; it never makes Ready False."""

from datetime import UTC, datetime
from typing import Any

from tests.operator.support.manifests import SETTINGS, deployment, pod, service

from fairlead_operator.desired import Desired, desired
from fairlead_operator.observed import Observed, ProbeResult
from fairlead_operator.rollout.image_faults import find_image_fault, find_obstacle
from fairlead_operator.status import fallback
from fairlead_operator.status.conditions import find
from fairlead_operator.status.transitions import events_for

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
READY = {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
PODS = tuple(pod(f"qwen-worker-{number}", **READY) for number in (1, 2, 3))
WHY = "the start-up trial failed, and these are off: overlap: 3 of 16 requests get other tokens than with plain steps"


def look(fallbacks: dict[str, str] | None, before: Desired | None = None) -> Desired:
    children = {"worker": deployment("worker", 3), "router": deployment("router", 2)}
    observed = Observed(children, pods=PODS, probe=ProbeResult(1, True, "", 0, NOW.timestamp()), fallbacks=fallbacks)
    status: Any = before.status.model_dump(by_alias=True, mode="json") if before else None
    return desired(service(status=status, replicas=3), observed, SETTINGS, NOW)


def degraded(plan: Desired) -> tuple[str, str, str]:
    found = find(plan.status.conditions, "Degraded")
    assert found is not None
    return found.status, found.reason, found.message


def test_the_fault_names_the_pod_and_the_reason_and_the_service_stays_ready() -> None:
    healthy = look({})
    assert degraded(healthy) == ("False", "AsExpected", "")
    slow = look({"qwen-worker-2": WHY}, healthy)
    status, reason, message = degraded(slow)
    assert (status, reason) == ("True", "WorkerFallback")
    assert message.startswith(f"One worker serves more slowly. Pod qwen-worker-2: {WHY}. ") and "spec.engine.args" in message
    ready = find(slow.status.conditions, "Ready")
    assert ready is not None and ready.status == "True"
    assert events_for(healthy.status, slow.status) == [("Warning", "WorkerFallback", message)]
    more = look({"qwen-worker-3": "x", "qwen-worker-2": WHY}, slow)
    assert degraded(more)[2].startswith("2 workers serve more slowly. Pod qwen-worker-2: ")
    assert degraded(look({}, more))[:2] == ("False", "AsExpected")


def test_the_fault_survives_a_restart_of_the_operator_and_ends_with_the_pod() -> None:
    slow = look({"qwen-worker-2": WHY}, look({}))
    restarted = look(None, slow)
    assert degraded(restarted) == degraded(slow) and events_for(slow.status, restarted.status) == []
    assert degraded(look({"qwen-worker-9": WHY}, slow))[0] == "False", "no pod has this name any more"


def test_a_routers_page_has_a_reason_for_each_worker_that_reports_one() -> None:
    workers = [
        {"pod": "a", "fallback": WHY},
        {"pod": "b", "fallback": ""},
        {"pod": "c"},
        {"pod": "", "address": "10.0.0.7:8000", "fallback": "y"},
    ]
    assert fallback.parse_router_page({"workers": workers}) == {"a": WHY, "10.0.0.7:8000": "y"}


def test_an_update_of_images_may_begin_with_the_fault_and_is_not_sent_back_by_it() -> None:
    slow = look({"qwen-worker-2": WHY})
    assert find_obstacle(find(slow.status.conditions, "Degraded")) == ""
    assert find_image_fault(find(slow.status.conditions, "Degraded"), find(slow.status.conditions, "Progressing")) == ""
