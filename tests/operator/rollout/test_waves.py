"""Waves: which services may begin. A pure plan, so whatever the fleet looks like."""

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fairlead_operator.rollout.images import GOING_BACK, UPDATING
from fairlead_operator.rollout.waves import Member, Owner, plan_wave
from fairlead_operator.settings import WaveLimits

PHASES = ("", "Current", "Pinned", "Held", "Waiting", "RollingOut", "Observing")
owners = st.integers(0, 30).map(lambda number: ("team", f"s{number:02}"))


@st.composite
def members(draw: st.DrawFn, phases: Iterable[str] = PHASES) -> tuple[Member, ...]:
    made = {}
    for owner in draw(st.sets(owners, max_size=20)):
        phase = draw(st.sampled_from(list(phases)))
        made[owner] = Member(owner, phase, draw(st.integers(0, 8)), draw(st.integers(0, 9)), phase == "Waiting" and draw(st.booleans()))
    return tuple(made.values())


limits = st.builds(WaveLimits, max_services=st.integers(1, 8), max_surge_gpus=st.none() | st.integers(0, 12))


def busy(fleet: Iterable[Member], granted: Iterable[Owner]) -> list[Member]:
    taken = set(granted)
    return [one for one in fleet if one.phase in UPDATING or one.owner in taken]


@given(members(), limits)
def test_whoever_is_admitted_the_limits_are_kept_and_used(fleet: tuple[Member, ...], limit: WaveLimits) -> None:
    before = busy(fleet, ())
    wave = plan_wave(fleet, (), limit)
    after = busy(fleet, wave.admitted)
    gpus = sum(one.surge_gpus for one in after)
    room = limit.max_surge_gpus
    assert all(one.admissible for one in fleet if one.owner in wave.admitted)
    if wave.admitted:
        assert len(after) <= limit.max_services and (room is None or gpus <= room)
    left = [one for one in fleet if one.admissible and one.owner not in wave.admitted]
    if len(after) < limit.max_services:
        assert not [one for one in left if room is None or gpus + one.surge_gpus <= room], "nobody waits who could begin"
    assert not before or len(after) >= len(before)


@given(members(), limits)
def test_the_next_plan_grants_no_more_before_the_statuses_are_written(fleet: tuple[Member, ...], limit: WaveLimits) -> None:
    first = plan_wave(fleet, (), limit)
    assert plan_wave(fleet, first.admitted, limit).admitted == frozenset(), "an admission counts from its moment"
    assert plan_wave(reversed(fleet), (), limit) == first, "the order of the members does not matter"


@given(members((*PHASES, *GOING_BACK)), limits)
def test_a_failed_service_stops_everything(fleet: tuple[Member, ...], limit: WaveLimits) -> None:
    wave = plan_wave(fleet, (), limit)
    failed = [one.owner for one in fleet if one.phase in GOING_BACK]
    assert set(wave.failed) == set(failed)
    assert not (failed and wave.admitted)


@given(members())
def test_a_paused_rollout_begins_nothing(fleet: tuple[Member, ...]) -> None:
    assert plan_wave(fleet, (), WaveLimits(paused=True)).admitted == frozenset()


@given(members(), limits)
def test_every_service_that_fits_is_updated_in_the_end(fleet: tuple[Member, ...], limit: WaveLimits) -> None:
    by_owner = {one.owner: one for one in fleet}
    room = limit.max_surge_gpus
    for _ in range(2 * len(fleet) + 1):
        for one in busy(by_owner.values(), ()):
            by_owner[one.owner] = Member(one.owner, "Current")
        for owner in plan_wave(by_owner.values(), (), limit).admitted:
            by_owner[owner] = Member(owner, "RollingOut", by_owner[owner].surge_gpus)
    assert not [one for one in by_owner.values() if one.admissible and (room is None or one.surge_gpus <= room)]


def test_the_smallest_is_first_and_one_at_zero_last() -> None:
    fleet = [Member(("team", f"s{workers}"), "Waiting", 0, workers, True) for workers in (0, 3, 1)]
    order = []
    while fleet:
        (owner,) = plan_wave(fleet, (), WaveLimits(max_services=1)).admitted
        order.append(owner[1])
        fleet = [one for one in fleet if one.owner != owner]
    assert order == ["s1", "s3", "s0"]


def test_a_held_update_takes_no_place_but_the_gpus_that_it_has() -> None:
    held = Member(("team", "held"), "RollingOut", 1, 1, held=True)
    waits = Member(("team", "waits"), "Waiting", 1, 1, admissible=True)
    one = WaveLimits(max_services=1)
    assert plan_wave((held, waits), (), one).admitted == {waits.owner}
    assert plan_wave((replace(held, held=False), waits), (), one).admitted == frozenset()
    assert plan_wave((held, waits), (), replace(one, max_surge_gpus=1)).admitted == frozenset()
    assert plan_wave((replace(held, surge_gpus=0), waits), (), replace(one, max_surge_gpus=1)).admitted == {waits.owner}
