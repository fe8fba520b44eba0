"""Conditions WeightsReady and PodTemplateValid, `status.traffic`, and which changes make an Event."""

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.support.manifests import SETTINGS, container, deployment, pod, service

from fairlead_operator.api import ServiceStatus
from fairlead_operator.api.status import TrafficStatus
from fairlead_operator.desired import Desired, desired
from fairlead_operator.observed import Observed, ObservedTraffic, PodEvent, ProbeResult
from fairlead_operator.revisions import worker_revision
from fairlead_operator.status import traffic, transitions
from fairlead_operator.status.conditions import find

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
SERVING = {"worker": deployment("worker", 1), "router": deployment("router", 2)}
LOADING = {"worker": deployment("worker", 2, ready=0), "router": deployment("router", 2)}
REVISION = worker_revision(service())
PROVEN = ProbeResult(1, True, "", 0, NOW.timestamp())


def look(observed: Observed, *, seconds: float = 0, before: Desired | None = None, **of: Any) -> Desired:
    status = before.status.model_dump(by_alias=True, mode="json") if before else None
    return desired(service(status=status, **of), observed, SETTINGS, NOW + timedelta(seconds=seconds))


def condition(plan: Desired, kind: str) -> tuple[str, str]:
    found = find(plan.status.conditions, kind)
    assert found is not None
    return found.status, found.reason


def words(plan: Desired, kind: str) -> str:
    return next(one.message for one in plan.status.conditions if one.type == kind)


def runs(name: str, *, started: bool) -> dict[str, Any]:
    return pod(name, revision=REVISION, containerStatuses=[container({"running": {}}, started=started)])


def test_weights_are_ready_when_every_worker_has_them() -> None:
    loading = Observed(LOADING, pods=(runs("a", started=True), runs("b", started=False)))
    plan = look(loading, replicas=2)
    assert condition(plan, "WeightsReady") == ("False", "Loading") and words(plan, "WeightsReady") == "1 of 2 workers have their model"
    assert condition(look(Observed(LOADING), replicas=2), "WeightsReady") == ("False", "NotStarted")
    both = Observed(LOADING, pods=(runs("a", started=True), runs("b", started=True)))
    assert condition(look(both, replicas=2), "WeightsReady") == ("True", "Loaded"), "one that drains has not lost them"
    assert condition(look(Observed(SERVING, probe=PROVEN)), "WeightsReady") == ("True", "Loaded")
    zero = look(Observed({**SERVING, "worker": deployment("worker", 0)}), replicas=0)
    assert condition(zero, "WeightsReady") == ("False", "ScaledToZero")


def test_a_template_that_is_refused_or_whose_pods_are_is_not_valid() -> None:
    refused = Observed(refusals={"Deployment/qwen-worker": 'field not declared in schema: "imagePullPolice"'})
    template = {"spec": {"containers": [{"name": "worker", "imagePullPolice": "x"}]}}
    plan = look(refused, podTemplate=template)
    assert condition(plan, "PodTemplateValid") == ("False", "PodTemplateInvalid") == condition(plan, "Ready")
    assert "Correct spec.podTemplate" in words(plan, "PodTemplateValid")
    assert condition(look(refused), "PodTemplateValid") == ("True", "Accepted"), "without a podTemplate the fault is not the user's"
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": 'violates PodSecurity "restricted": root'}
    plan = look(Observed({**SERVING, "worker": deployment("worker", 1, ready=0, updated=0, conditions=[failure])}))
    assert condition(plan, "PodTemplateValid") == ("False", "PodSecurity")


def test_a_paused_deployment_is_reported_with_the_remedy() -> None:
    paused = deployment("worker", 1, updated=0)
    paused["spec"]["paused"] = True
    plan = look(Observed({**SERVING, "worker": paused}))
    assert condition(plan, "Progressing") == ("False", "RolloutPaused")
    assert "kubectl rollout resume deployment/qwen-worker" in words(plan, "Progressing")


def test_a_pod_that_does_not_end_is_a_fault_of_a_service_that_is_ready() -> None:
    stuck = pod("old", phase="Running")
    stuck["metadata"]["deletionTimestamp"] = "2026-01-01T11:58:00Z"
    plan = look(Observed(SERVING, pods=(stuck,), probe=PROVEN))
    assert condition(plan, "Ready") == ("True", "Serving") and condition(plan, "Degraded") == ("True", "StuckTerminating")


def test_a_worker_that_stays_not_ready_is_a_fault() -> None:
    """Nine of ten workers not ready for hours must not look like a rollout."""
    unready = [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T12:00:00Z"}]
    runs_on = container({"running": {"startedAt": "2026-01-01T11:00:00Z"}}, started=True)
    lost = tuple(pod(f"w{number}", revision=REVISION, conditions=unready, containerStatuses=[runs_on]) for number in range(9))
    events = {"w0": PodEvent("Unhealthy", "Readiness probe failed: HTTP 503")}
    seen = Observed({**SERVING, "worker": deployment("worker", 10, ready=1)}, pods=lost, pod_events=events, probe=PROVEN)
    early = look(seen, seconds=1, replicas=10)
    assert condition(early, "Degraded") == ("False", "AsExpected") and early.wake_at == NOW.timestamp() + 120, "a drain ends by then"
    late = look(seen, seconds=120, before=early, replicas=10)
    assert condition(late, "Degraded") == ("True", "NotReady") and condition(late, "Ready") == ("True", "Serving")
    assert condition(late, "Available") == ("False", "BelowFloor") and "1 of 10 workers are ready, 10 %" in words(late, "Available")
    assert "HTTP 503" in words(late, "Degraded") and "delete the pod" in words(late, "Degraded")
    starts = container({"running": {"startedAt": "2026-01-01T12:00:05Z"}}, started=True)
    loading = (pod("w0", revision=REVISION, conditions=unready, containerStatuses=[starts]),)
    assert condition(look(Observed(LOADING, pods=loading), seconds=900, replicas=2), "Degraded")[0] == "False", "a load may take long"
    back = look(Observed({**SERVING, "worker": deployment("worker", 10)}, probe=PROVEN), seconds=130, before=late, replicas=10)
    assert condition(back, "Ready") == ("True", "Serving") and condition(back, "Degraded") == ("False", "AsExpected")


def page(*counts: tuple[int, int, int] | None) -> dict[str, Any]:
    names = ("prompt_tokens", "cached_tokens", "output_tokens")
    loads: list[dict[str, Any]] = [dict(zip(names, one, strict=True)) if one else {} for one in counts]
    return {"workers": [{"pod": f"w{number}", "ready": True, "load": load} for number, load in enumerate(loads)]}


def test_rates_are_of_all_workers_and_a_restart_counts_from_nothing() -> None:
    first, last = (
        traffic.CounterSnapshot.parse(page((1000, 500, 100), (0, 0, 0)), 0.0),
        traffic.CounterSnapshot.parse(page((4000, 2750, 1300), (0, 0, 0)), 30.0),
    )
    assert first is not None and last is not None
    assert traffic.measure_traffic(first, last) == ObservedTraffic(40, 100, 75)
    again, soon = (
        traffic.CounterSnapshot.parse(page((30, 0, 60), (0, 0, 0)), 60.0),
        traffic.CounterSnapshot.parse(page((9, 9, 9), (0, 0, 0)), 5.0),
    )
    assert again is not None and soon is not None
    assert traffic.measure_traffic(last, again) == ObservedTraffic(2, 1, 0), "began anew: what it has counted since then"
    assert traffic.measure_traffic(first, soon) is None, "too near"
    joined = traffic.CounterSnapshot.parse(page((4000, 2750, 1300), (9000, 0, 0), (7, 7, 7)), 60.0)
    assert joined is not None and traffic.measure_traffic(last, joined) == ObservedTraffic(0, 300, 0), "the third was not seen before"
    assert traffic.CounterSnapshot.parse(page((1, 1, 1), None), 0.0) is None, "a worker of an older release: a part is no measure"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9000), st.none() | st.integers(0, 100)), min_size=1, max_size=40))
def test_traffic_is_written_once_a_minute_at_most_and_only_when_it_differs(seen: list[tuple[int, int, int | None]]) -> None:
    said: TrafficStatus | None = None
    written: list[datetime] = []
    for number, figures in enumerate(seen):
        now = NOW + timedelta(seconds=20 * number)
        after, wake_at = traffic.build_status(said, ObservedTraffic(*figures), now)
        if after != said:
            assert after is not None and after.tokens_per_second == figures[0]
            assert not written or (now - written[-1]).total_seconds() >= 60
            written.append(now)
        assert wake_at is None or now.timestamp() < wake_at <= now.timestamp() + 60
        said = after
        if wake_at is not None:
            then = datetime.fromtimestamp(wake_at, UTC)
            assert traffic.build_status(said, ObservedTraffic(*figures), then)[0] != said, "what waits is written when its minute is over"


def test_an_idle_service_writes_no_traffic_and_one_without_workers_has_none() -> None:
    idle = look(Observed(SERVING, probe=PROVEN, traffic=ObservedTraffic(0, 0, None)))
    assert idle.status.traffic is None
    busy = look(Observed(SERVING, probe=PROVEN, traffic=ObservedTraffic(500, 2000, 60)), before=idle)
    assert busy.status.traffic is not None and busy.status.traffic.cache_hit_percent == 60
    same = look(Observed(SERVING, probe=PROVEN, traffic=ObservedTraffic(540, 1900, 55)), before=busy, seconds=600)
    assert same.status == busy.status, "within a tenth: no write"
    restarted = look(Observed(SERVING), before=busy, seconds=700)
    assert restarted.status.traffic == busy.status.traffic, "the last state stays until it was observed again"
    down = look(Observed({**SERVING, "worker": deployment("worker", 1, ready=0)}), before=busy, seconds=800)
    assert down.status.traffic is not None and (down.status.traffic.tokens_per_second, down.status.traffic.cache_hit_percent) == (0, 60)


def status_of(*conditions: tuple[str, str, str, str]) -> ServiceStatus:
    since = "2026-01-01T00:00:00Z"
    made = [dict(zip(("type", "status", "reason", "message"), one, strict=True)) | {"lastTransitionTime": since} for one in conditions]
    return ServiceStatus.model_validate({"conditions": made})


def test_each_change_of_status_or_reason_and_of_a_faults_message_is_an_event() -> None:
    well = status_of(("Ready", "True", "Serving", "x"), ("Degraded", "False", "AsExpected", ""))
    one = status_of(("Ready", "False", "Loading", "1 of 2"), ("Degraded", "False", "AsExpected", ""))
    two = status_of(("Ready", "False", "Loading", "2 of 2"), ("Degraded", "False", "AsExpected", ""))
    assert transitions.events_for(ServiceStatus(), well) == [("Normal", "Serving", "x")]
    assert transitions.events_for(well, one) == [("Normal", "Loading", "1 of 2")] and transitions.events_for(one, two) == []
    bad = status_of(("Ready", "False", "Crashed", "a"), ("Degraded", "True", "Crashed", "a"))
    worse = status_of(("Ready", "False", "Crashed", "b"), ("Degraded", "True", "Crashed", "b"))
    assert transitions.events_for(two, bad) == [("Warning", "Crashed", "a")] and transitions.events_for(bad, worse) == [
        ("Warning", "Crashed", "b")
    ]
    assert transitions.events_for(worse, worse) == []
    lost = status_of(("Ready", "True", "Serving", "x"), ("Degraded", "True", "IndexUnavailable", "since 1"))
    still = status_of(("Ready", "True", "Serving", "x"), ("Degraded", "True", "IndexUnavailable", "since 2"))
    assert transitions.events_for(well, lost) == [("Warning", "IndexUnavailable", "since 1")] and transitions.events_for(lost, still) == []
    late = status_of(("Ready", "True", "Serving", "x"), ("Progressing", "False", "ProgressDeadlineExceeded", "timed out"))
    assert transitions.events_for(well, late) == [("Warning", "ProgressDeadlineExceeded", "timed out")]


def test_a_rollout_of_a_service_that_serves_is_an_event_and_a_change_of_its_size_is_not() -> None:
    def step(status: str, reason: str) -> ServiceStatus:
        return status_of(("Ready", "True", "Serving", "x"), ("Progressing", status, reason, reason))

    complete, rolling, scaling, probing = (
        step("False", "Complete"),
        step("True", "RollingOut"),
        step("True", "Scaling"),
        step("True", "Probing"),
    )
    assert transitions.events_for(complete, rolling) == [("Normal", "RollingOut", "RollingOut")]
    assert transitions.events_for(rolling, probing) == [] and transitions.events_for(probing, complete) == [
        ("Normal", "Complete", "Complete")
    ]
    assert transitions.events_for(complete, scaling) == [] and transitions.events_for(scaling, complete) == []
    failed = status_of(
        ("Ready", "True", "Serving", "x"), ("Progressing", "False", "CanaryFailed", "y"), ("Degraded", "True", "CanaryFailed", "y")
    )
    assert transitions.events_for(rolling, failed) == [("Warning", "CanaryFailed", "y")]


def test_each_step_of_an_update_to_new_images_is_one_event() -> None:
    def at(phase: str) -> ServiceStatus:
        update = {"phase": phase, "workerImage": "worker:2", "routerImage": "control:2", "message": "CrashLoopBackOff: x"}
        return ServiceStatus.model_validate({"imageUpdate": update})

    begun = transitions.events_for(at("Waiting"), at("RollingOut"))
    assert begun == [("Normal", "UpdatingImages", "The update to worker:2 and control:2 begins")]
    assert transitions.events_for(at("RollingOut"), at("RollingOut")) == transitions.events_for(at("RollingOut"), at("Observing")) == []
    assert transitions.events_for(at("Observing"), at("Current")) == [
        ("Normal", "ImagesUpdated", "The service serves with worker:2 and control:2")
    ]
    ((type_, reason, message),) = transitions.events_for(at("Observing"), at("RollingBack"))
    assert (type_, reason) == ("Warning", "UpdateFailed") and "CrashLoopBackOff" in message
    assert transitions.events_for(at("RollingBack"), at("Failed")) == transitions.events_for(at("Pinned"), at("Current")) == []
