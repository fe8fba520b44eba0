"""The status of a service: the real cause, no flapping, Ready only after a probe, and kept transition times."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.support.manifests import SETTINGS, container, deployment, pod, service

from fairlead_operator import causes
from fairlead_operator.desired import Desired, desired
from fairlead_operator.observed import Observed, ProbeResult
from fairlead_operator.revisions import worker_revision
from fairlead_operator.status.conditions import find

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
SERVING = {"worker": deployment("worker", 1), "router": deployment("router", 2)}
FAILED = {"exitCode": 1, "reason": "Error", "message": "loading\nValueError: no such model\n"}


def proof(succeeded: bool = True, *, generation: int = 1, attempts: int = 0) -> ProbeResult:
    return ProbeResult(generation, succeeded, "" if succeeded else "refused", attempts, NOW.timestamp())


def look(observed: Observed, **of: Any) -> Desired:
    return desired(service(**of), observed, SETTINGS, NOW)


def ready(plan: Desired) -> tuple[str, str]:
    condition = find(plan.status.conditions, "Ready")
    assert condition is not None
    return condition.status, condition.reason


def test_ready_needs_a_completion_of_this_generation() -> None:
    plan = look(Observed(SERVING))
    assert ready(plan) == ("False", "Probing") and plan.probe_due
    assert ready(look(Observed(SERVING, probe=proof(generation=0)))) == ("False", "Probing")
    assert ready(look(Observed(SERVING, probe=proof()))) == ("True", "Serving")
    failed = look(Observed(SERVING, probe=proof(False, attempts=2)))
    assert ready(failed) == ("False", "RequestFailed") and not failed.probe_due and failed.wake_at == NOW.timestamp() + 4


@pytest.mark.parametrize(
    ("budget", "replicas", "blocked"),
    [
        ({"minAvailable": 1}, 1, True),
        ({"minAvailable": "100%"}, 4, True),
        ({"minAvailable": "51%"}, 1, True),
        ({"maxUnavailable": 0}, 2, True),
        ({"minAvailable": 1}, 2, False),
        ({"maxUnavailable": 1}, 1, False),
        ({"minAvailable": "50%"}, 2, False),
        ({"minAvailable": 1}, 0, False),
    ],
)
def test_a_budget_that_lets_no_worker_be_evicted_is_named(budget: dict[str, Any], replicas: int, blocked: bool) -> None:
    serving = {"worker": deployment("worker", replicas), "router": deployment("router", 2)}
    plan = look(Observed(serving, probe=proof()), replicas=replicas, podDisruptionBudget=budget)
    available = find(plan.status.conditions, "Available")
    assert available is not None and ("lets no worker be evicted" in available.message) is blocked
    assert not blocked or f"spec.podDisruptionBudget.{next(iter(budget))}" in available.message


def test_ready_stays_and_a_new_generation_keeps_it_until_the_next_probe() -> None:
    status = look(Observed(SERVING, probe=proof())).status.model_dump(by_alias=True)
    after_restart = look(Observed(SERVING), status=status)
    assert ready(after_restart) == ("True", "Serving") and not after_restart.probe_due
    scaled = look(Observed(SERVING), status=status, generation=2)
    kept = find(scaled.status.conditions, "Ready")
    assert ready(scaled) == ("True", "Serving") and kept is not None and kept.observed_generation == 1 and scaled.probe_due


def test_replaced_pods_are_proven_again_without_an_edit() -> None:
    """As after new images of the operator, with which the generation stays. The earlier result proves nothing about the new pods."""
    proven = look(Observed(SERVING, probe=proof()))
    assert proven.probe_spent, "the proof is in the status"
    replaced = SERVING | {"router": deployment("router", 3, ready=2, updated=1)}
    during = look(Observed(replaced, probe=proof()), status=proven.status.model_dump(by_alias=True))
    kept = find(during.status.conditions, "Ready")
    assert ready(during) == ("True", "Serving") and kept is not None and kept.observed_generation == 0
    assert during.probe_spent and not during.probe_due
    status = during.status.model_dump(by_alias=True)
    after = look(Observed(SERVING), status=status)
    assert after.probe_due and ready(after) == ("True", "Serving")
    failed = look(Observed(SERVING, probe=proof(False, attempts=1)), status=status)
    assert ready(failed) == ("False", "RequestFailed")
    again = find(look(Observed(SERVING, probe=proof()), status=status).status.conditions, "Ready")
    assert again is not None and again.observed_generation == 1


def test_another_revision_is_proven_again_after_a_gap() -> None:
    """The operator was away while all pods were replaced."""
    status = look(Observed(SERVING, probe=proof())).status
    other = status.model_copy(update={"revision": "qwen-of-earlier-images"}).model_dump(by_alias=True)
    assert look(Observed(SERVING), status=other).status.conditions[0].observed_generation == 0


@given(
    workers=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    routers=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2)),
    probe=st.none() | st.builds(proof, st.booleans(), generation=st.integers(0, 2), attempts=st.integers(1, 9)),
    before=st.sampled_from(["", "True", "False"]),
    replicas=st.integers(0, 3),
)
@settings(deadline=None)
def test_ready_is_never_true_without_ready_pods(workers: Any, routers: Any, probe: Any, before: str, replicas: int) -> None:
    seen: dict[str, Any] = {}
    if workers:
        seen["worker"] = deployment("worker", workers[0], ready=workers[1], updated=workers[2])
    if routers:
        seen["router"] = deployment("router", routers[0], ready=routers[1])
    condition = {
        "type": "Ready",
        "status": before,
        "reason": "Serving",
        "observedGeneration": 2,
        "lastTransitionTime": "2025-01-01T00:00:00Z",
    }
    condition |= {"message": ""}
    status = {"conditions": [condition]} if before else None
    plan = look(Observed(seen, probe=probe), generation=2, status=status, replicas=replicas)
    truth, _ = ready(plan)
    if truth == "True":
        assert workers is not None and workers[1] > 0 and routers is not None and routers[1] > 0
        assert before == "True" or (probe is not None and probe.succeeded and probe.generation == 2)
    for condition in plan.status.conditions:
        assert condition.last_transition_time
    again = desired(
        service(generation=2, replicas=replicas, status=plan.status.model_dump(by_alias=True)), Observed(seen, probe=probe), SETTINGS, NOW
    )
    assert again.status == plan.status, "nothing new seen, nothing new said: no write"


def test_pods_of_the_desired_revision_come_first_and_terminating_ones_are_ignored() -> None:
    wanted = worker_revision(service())
    old = pod("a-old", revision="old", phase="Running", containerStatuses=[container({"terminated": {**FAILED, "message": "old"}})])
    new = pod("z-new", revision=wanted, phase="Running", containerStatuses=[container({"terminated": {**FAILED, "message": "new"}})])
    cause = causes.find_worst_cause([old, new], "worker", wanted)
    assert cause is not None and "z-new" in cause.message
    new["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cause = causes.find_worst_cause([old, new], "worker", wanted)
    assert cause is not None and "a-old" in cause.message


def test_scaled_to_zero_says_so() -> None:
    plan = look(Observed({**SERVING, "worker": deployment("worker", 0)}), replicas=0)
    assert ready(plan) == ("False", "ScaledToZero") and plan.status.desired_replicas == 0 and not plan.probe_due
    keda = look(Observed({**SERVING, "worker": deployment("worker", 0)}), replicas=0, routing={"args": ["--ready-without-workers"]})
    assert ready(keda) == ("True", "Asleep"), "its routers hold the next request, and KEDA sees it"


ZERO = {"minReplicas": 0, "maxReplicas": 3, "target": {"ttftMilliseconds": 2000}}


def test_a_service_that_wakes_is_ready_until_its_routers_hold_no_longer() -> None:
    asleep = look(Observed({**SERVING, "worker": deployment("worker", 0)}), scaling=ZERO)
    assert ready(asleep) == ("True", "Asleep") and compute(asleep, "Available") == ("True", "Asleep")
    assert compute(asleep, "Progressing") == ("False", "Complete") and compute(asleep, "Reconciling") == ("", "")

    def wake(seconds: float, before: Desired, *pods: Any, probe: Any = None, count: int = 0, **routing: Any) -> Desired:
        seen = Observed({**SERVING, "worker": deployment("worker", 1, ready=count)}, pods=pods, probe=probe)
        status = before.status.model_dump(by_alias=True, mode="json")
        one = service(status=status, scaling=ZERO, routing=routing)
        return desired(one, seen, SETTINGS, NOW + timedelta(seconds=seconds))

    waking = wake(0, asleep)
    assert ready(waking) == ("True", "Waking") and compute(waking, "Progressing") == ("True", "Scaling") == compute(waking, "Reconciling")
    assert waking.wake_at == NOW.timestamp() + 600 and ready(wake(599, waking)) == ("True", "Waking")
    assert ready(wake(600, waking)) == ("False", "Starting"), "held requests get 503"
    short = wake(0, asleep, holdTimeoutSeconds=90)
    assert ready(wake(90, short, holdTimeoutSeconds=90))[0] == "False"
    broken = pod(phase="Pending", containerStatuses=[container({"waiting": {"reason": "ErrImagePull", "message": "not found"}})])
    assert ready(wake(5, waking, broken)) == ("False", "ImagePullBackOff"), "it will not wake"
    loaded = wake(9, waking, count=1)
    assert loaded.probe_due and ready(loaded) == ("True", "Waking"), "one that slept has proven nothing"
    assert ready(wake(10, loaded, count=1, probe=proof())) == ("True", "Serving")


def compute(plan: Desired, type_: str) -> tuple[str, str]:
    """Return status and reason of a condition; empty: it is absent."""
    one = find(plan.status.conditions, type_)
    return (one.status, one.reason) if one is not None else ("", "")


def test_an_edit_is_ready_for_kubectl_wait_once_no_old_pod_is_left() -> None:
    """`kubectl wait` ignores a condition whose observedGeneration is older than the object's."""
    status = look(Observed(SERVING, probe=proof())).status.model_dump(by_alias=True, mode="json")
    rolling = deployment("worker", 1, ready=2, updated=1)
    rolling["status"]["replicas"] = 2
    plan = look(Observed({**SERVING, "worker": rolling}), status=status, generation=2)
    kept = find(plan.status.conditions, "Ready")
    assert kept is not None and (kept.status, kept.observed_generation) == ("True", 1) and not plan.probe_due
    assert compute(plan, "Progressing") == ("True", "RollingOut")
    status = plan.status.model_dump(by_alias=True, mode="json")
    done = look(Observed(SERVING), status=status, generation=2)
    assert done.probe_due and compute(done, "Progressing") == ("True", "Probing") and ready(done) == ("True", "Serving")
    proven = look(Observed(SERVING, probe=proof(generation=2)), status=status, generation=2)
    kept = find(proven.status.conditions, "Ready")
    assert kept is not None and kept.observed_generation == 2 and compute(proven, "Progressing") == ("False", "Complete")


def test_a_completion_that_keeps_failing_is_a_fault() -> None:
    assert compute(look(Observed(SERVING, probe=proof(False, attempts=4))), "Degraded") == ("False", "AsExpected")
    assert compute(look(Observed(SERVING, probe=proof(False, attempts=5))), "Degraded") == ("True", "RequestFailed")


def test_a_step_that_needs_help_is_stalled() -> None:
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "has timed out"}
    plan = look(Observed({**SERVING, "worker": deployment("worker", 1, ready=0, conditions=[late])}))
    assert compute(plan, "Stalled") == ("True", "ProgressDeadlineExceeded") == compute(plan, "Degraded")
    assert compute(plan, "Reconciling") == ("", "")


def test_a_rollout_of_the_routers_is_not_called_a_router_that_is_not_ready() -> None:
    plan = look(Observed({**SERVING, "router": deployment("router", 2, ready=2, updated=1)}))
    progressing = find(plan.status.conditions, "Progressing")
    assert progressing is not None and (progressing.status, progressing.reason) == ("True", "RollingOut")
    assert ready(plan) == ("False", "Probing"), "requests can be served, and a completion shows it"


@pytest.mark.parametrize(
    ("of", "field"),
    [
        ({"replicas": 3}, "spec.replicas"),
        ({"scaling": {"maxReplicas": 5, "target": {"ttftMilliseconds": 2000}}}, "spec.scaling.maxReplicas"),
    ],
)
def test_without_an_edit_the_advice_is_not_to_undo_one(of: dict[str, Any], field: str) -> None:
    """Nothing was edited: there is only the present revision."""
    stuck = deployment("worker", 3, ready=2)
    stuck["status"]["conditions"] = [
        {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "it hangs"}
    ]
    plan = look(Observed({"worker": stuck, "router": deployment("router", 2)}), **of)
    progressing = find(plan.status.conditions, "Progressing")
    assert progressing is not None and progressing.reason == "ProgressDeadlineExceeded"
    assert progressing.message == f"it hangs. Make room for 3 workers, or set {field} to what fits (2 are ready)"


def test_a_router_that_is_missing_for_ten_minutes_is_a_fault_with_its_pod() -> None:
    queued = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "kueue"}]
    seen = Observed({**SERVING, "router": deployment("router", 2, ready=1)}, pods=(pod("r-2", "router", conditions=queued),), probe=proof())
    early = look(seen)
    assert compute(early, "Degraded") == ("False", "AsExpected") and early.status.reduced_since == "2026-01-01T12:00:00Z"
    status = early.status.model_dump(by_alias=True, mode="json")
    assert early.wake_at == NOW.timestamp() + 600 and ready(early) == ("True", "Serving")
    late = desired(service(status=status), seen, SETTINGS, NOW + timedelta(seconds=600))
    fault = find(late.status.conditions, "Degraded")
    assert fault is not None and (fault.status, fault.reason) == ("True", "CapacityReduced")
    assert fault.message.startswith("1 of 2 routers are ready since 2026-01-01T12:00:00Z: pod r-2 waits for its scheduling gates")
