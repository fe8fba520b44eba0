"""Scheduled minimums: a pure function of time, also on the days when clocks change."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.support.manifests import SETTINGS, deployment, service

from fairlead_operator.api import InferenceService, InvalidManifest
from fairlead_operator.api.scaling import Schedule
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed, Recommendation
from fairlead_operator.revisions import router_revision
from fairlead_operator.scaling.schedules import find_minimum

OFFICE = {"name": "office", "start": "0 8 * * 1-5", "end": "0 18 * * 1-5", "timeZone": "Europe/Berlin", "minReplicas": 5}


def schedule(**fields: Any) -> Schedule:
    return Schedule.model_validate(OFFICE | fields)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def scheduled(now: str, target: bool = False, replicas: int = 1, live: int | None = 1, **scaling: Any) -> Any:
    bounds = {"minReplicas": 1, "maxReplicas": 8, "schedules": [OFFICE], **({"target": {"ttftMilliseconds": 2000}} if target else {})}
    one = service(scaling=bounds | scaling, **({} if target else {"replicas": replicas}))
    live_objects = {} if live is None else {"worker": deployment("worker", live)}
    return desired(one, Observed(live_objects), SETTINGS, at(now))


def workers(plan: Any) -> int:
    (found,) = [one["spec"]["replicas"] for one in plan.objects if one["metadata"]["name"] == "qwen-worker" and one["kind"] == "Deployment"]
    return int(found)


@pytest.mark.parametrize(
    ("now", "replicas", "changes"),
    [  # 2026-03-02 is a Monday, in winter time (UTC+1)
        ("2026-03-02T06:59:59", 0, "2026-03-02T07:00:00"),
        ("2026-03-02T07:00:00", 5, "2026-03-02T17:00:00"),
        ("2026-03-02T16:59:59", 5, "2026-03-02T17:00:00"),
        ("2026-03-02T17:00:00", 0, "2026-03-03T07:00:00"),
        ("2026-03-07T10:00:00", 0, "2026-03-09T07:00:00"),  # a Saturday
        ("2026-03-30T05:59:59", 0, "2026-03-30T06:00:00"),  # the Monday after clocks went forward (UTC+2)
        ("2026-03-30T06:00:00", 5, "2026-03-30T16:00:00"),
    ],
)
def test_office_hours_follow_the_local_clock(now: str, replicas: int, changes: str) -> None:
    found = find_minimum([schedule()], at(now))
    assert found.replicas == replicas and found.ends_at == at(changes).timestamp()
    assert found.schedule == ("office" if replicas else "")


@pytest.mark.parametrize(
    ("fields", "now", "replicas"),
    [
        # 2026-03-29: 02:00 becomes 03:00 in Berlin (01:00 UTC), so 02:30 does not come. Its start runs when the gap ends.
        ({"start": "30 2 * * *", "end": "0 5 * * *"}, "2026-03-29T00:59:59", 0),
        ({"start": "30 2 * * *", "end": "0 5 * * *"}, "2026-03-29T01:30:00", 5),
        ({"start": "30 2 * * *", "end": "0 5 * * *"}, "2026-03-29T03:00:00", 0),
        ({"start": "0 1 * * *", "end": "30 2 * * *"}, "2026-03-29T00:30:00", 5),
        ({"start": "0 1 * * *", "end": "30 2 * * *"}, "2026-03-29T01:30:00", 0),
        # 2026-10-25: 03:00 becomes 02:00 (01:00 UTC), so 02:30 comes twice (00:30 and 01:30 UTC). It counts once.
        ({"start": "30 1 * * *", "end": "30 2 * * *"}, "2026-10-25T00:29:59", 5),
        ({"start": "30 1 * * *", "end": "30 2 * * *"}, "2026-10-25T00:30:00", 0),
        ({"start": "30 1 * * *", "end": "30 2 * * *"}, "2026-10-25T01:15:00", 0),
        ({"start": "30 1 * * *", "end": "30 2 * * *"}, "2026-10-25T01:45:00", 0),
        ({"start": "30 2 * * *", "end": "30 3 * * *"}, "2026-10-25T00:30:00", 5),
        ({"start": "30 2 * * *", "end": "30 3 * * *"}, "2026-10-25T01:15:00", 5),
        ({"start": "30 2 * * *", "end": "30 3 * * *"}, "2026-10-25T02:30:00", 0),
    ],
)
def test_days_when_clocks_change(fields: dict[str, str], now: str, replicas: int) -> None:
    assert find_minimum([schedule(**fields)], at(now)).replicas == replicas


@given(
    st.datetimes(datetime(2026, 3, 20), datetime(2026, 11, 10)),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC", "Asia/Kolkata"]),
    st.tuples(st.integers(0, 59), st.integers(0, 23), st.integers(0, 59), st.integers(0, 23)).filter(lambda one: one[:2] != one[2:]),
)
@settings(deadline=None, max_examples=60)
def test_the_minimum_changes_only_when_it_says(start: datetime, zone: str, times: tuple[int, int, int, int]) -> None:
    one = schedule(start=f"{times[0]} {times[1]} * * *", end=f"{times[2]} {times[3]} * * *", timeZone=zone)
    now = start.replace(tzinfo=UTC)
    for _ in range(4):
        found = find_minimum([one], now)
        assert found.ends_at is not None and now.timestamp() < found.ends_at <= now.timestamp() + 26 * 3600
        change = datetime.fromtimestamp(found.ends_at, UTC)
        for part in (0.3, 0.9):
            between = now + (change - now) * part
            assert find_minimum([one], between).replicas == found.replicas
        assert find_minimum([one], change - timedelta(seconds=0.001)).replicas == found.replicas
        now = change


def test_overlapping_schedules_ask_for_the_largest() -> None:
    peak = schedule(name="peak", start="0 12 * * *", end="0 14 * * *", minReplicas=7)
    assert [find_minimum([schedule(), peak], at(f"2026-03-02T{hour}:00:00")).replicas for hour in ("10", "11", "12", "13")] == [5, 7, 7, 5]
    assert find_minimum([schedule(), peak], at("2026-03-02T10:00:00")).ends_at == at("2026-03-02T11:00:00").timestamp()
    assert find_minimum([], at("2026-03-02T10:00:00")).ends_at is None


def test_a_schedule_raises_the_spec_s_number_and_the_operator_wakes_at_its_end() -> None:
    inside = scheduled("2026-03-02T10:00:00")
    assert workers(inside) == 5 and inside.status.desired_replicas == 5
    end = at("2026-03-02T17:00:00").timestamp()
    assert inside.minimum.ends_at == end and inside.wake_at is not None and inside.wake_at <= end
    assert inside.status.scaling.schedule == "office" and "at least 5 workers" in inside.status.scaling.message
    outside = scheduled("2026-03-02T18:00:00", live=5)
    assert workers(outside) == 1 and outside.status.scaling.schedule == ""
    assert outside.minimum.ends_at == at("2026-03-03T07:00:00").timestamp() and outside.wake_at <= outside.minimum.ends_at
    assert workers(scheduled("2026-03-02T10:00:00", replicas=7)) == 7, "a minimum, not a number"


def test_a_schedule_raises_the_autoscaler_s_minimum_and_says_so() -> None:
    inside = scheduled("2026-03-02T10:00:00", target=True)
    assert workers(inside) == 5 and inside.decision.reason == "schedule office: 1 -> 5"
    assert workers(scheduled("2026-03-02T10:00:00", target=True, live=6)) == 6, "demand may ask for more"
    assert workers(scheduled("2026-03-02T10:00:00", target=True, live=None)) == 5
    after = scheduled("2026-03-02T18:00:00", target=True, live=5)
    assert workers(after) == 5 and after.decision is None, "workers leave when the demand says so, not when the clock does"


def test_a_service_at_zero_is_woken_by_its_schedule_and_sleeps_after_it_without_restarting_routers() -> None:
    asleep = {"minReplicas": 0, "idleTimeoutSeconds": 60}
    inside = scheduled("2026-03-02T10:00:00", target=True, live=0, **asleep)
    assert workers(inside) == 5
    one = service(scaling={"maxReplicas": 8, "target": {"ttftMilliseconds": 2000}, "schedules": [OFFICE], **asleep})
    idle = Recommendation(at("2026-03-02T10:00:00").timestamp(), 0, 0, 900.0, False)
    during = desired(one, Observed({"worker": deployment("worker", 5)}, recommendations=(idle,)), SETTINGS, at("2026-03-02T10:00:00"))
    after = desired(one, Observed({"worker": deployment("worker", 5)}, recommendations=(idle,)), SETTINGS, at("2026-03-02T19:00:00"))
    assert workers(during) == 5 and workers(after) == 0
    pods = [
        next(
            each["spec"]["template"] for each in plan.objects if each["metadata"]["name"] == "qwen-router" and each["kind"] == "Deployment"
        )
        for plan in (during, after)
    ]
    assert pods[0] == pods[1] and router_revision(one) == pods[0]["metadata"]["labels"]["fairlead.dev/revision"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"timeZone": "Europe/Atlantis"}, "timeZone 'Europe/Atlantis' is unknown"),
        ({"timeZone": "Europe"}, "timeZone 'Europe' is unknown"),
        ({"start": "0 25 * * *"}, "start '0 25 * * *' is not a cron expression"),
        ({"end": "0 0 30 2 *"}, "end '0 0 30 2 *' is not a cron expression"),
        ({"start": "0 0 8 * * 1"}, "spec.scaling.schedules[0].start"),
        ({"minReplicas": 9}, "minReplicas must be at most spec.scaling.maxReplicas"),
        ({"minReplicas": 0}, "spec.scaling.schedules[0].minReplicas"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(fields: dict[str, Any], words: str) -> None:
    body = {
        "metadata": {"name": "qwen"},
        "spec": {"model": {"uri": "hf://a/b"}, "scaling": {"maxReplicas": 8, "schedules": [OFFICE | fields]}},
    }
    with pytest.raises(InvalidManifest) as refused:
        InferenceService.parse(body)
    assert words in str(refused.value)
