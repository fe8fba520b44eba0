"""The ledger of promised starts: a booked request that returns on time can start, whatever arrived meanwhile."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_router.serving.promise_ledger import MAX_BOOKINGS, Demand, PromiseLedger

RATE = 1000.0

ARRIVALS = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 3000), st.floats(0, 4), st.integers(0, 1), st.sampled_from("ab")), min_size=1, max_size=60
)
"""Seconds since the last arrival, tokens, slack, priority, tenant."""


@given(ARRIVALS)
@settings(deadline=None)
def test_every_request_that_returns_exactly_on_time_can_start_within_its_slack(arrivals: list[tuple[float, int, float, int, str]]) -> None:
    """One worker in order of arrival. All have one urgency here: a more urgent one may break the promises of others."""
    ledger, now, busy_until = PromiseLedger(), 0.0, 0.0
    waiting: list[tuple[float, Demand]] = []
    for number, (gap, tokens, slack, _, tenant) in enumerate(arrivals):
        now += gap
        for at, demand in sorted((entry for entry in waiting if entry[0] <= now), key=lambda entry: entry[0]):
            busy_until = start_booked(ledger, at, demand, busy_until)
        waiting = [entry for entry in waiting if entry[0] > now]
        demand, wait = Demand(number, tenant, 0, tokens, slack), max(0.0, busy_until - now)
        if ledger.fits(demand, wait, RATE, now):
            busy_until = now + wait + tokens / RATE
        else:
            waiting.append((now + ledger.promise(demand, wait, RATE, now), demand))
    for at, demand in sorted(waiting, key=lambda entry: entry[0]):
        busy_until = start_booked(ledger, at, demand, busy_until)
    assert not ledger.broken and not len(ledger)


def start_booked(ledger: PromiseLedger, at: float, demand: Demand, busy_until: float) -> float:
    booking = ledger.find(demand.key)
    assert booking is not None and booking.at == at
    wait = max(0.0, busy_until - at)
    assert wait <= demand.slack + 1e-6
    ledger.close(booking, kept=True)
    return at + wait + demand.tokens / RATE


@given(st.floats(0, 500), st.floats(0, 10), st.integers(1, 5000))
def test_without_bookings_the_promise_is_the_first_whole_second_of_room(wait: float, slack: float, tokens: int) -> None:
    ledger, demand = PromiseLedger(), Demand("one", "", 0, tokens, slack)
    seconds = ledger.promise(demand, wait, RATE, 100.0)
    assert seconds == max(1, math.ceil(wait - slack - 1e-9))
    booking = ledger.find("one")
    assert booking is not None and booking.at == 100.0 + seconds


@given(ARRIVALS)
@settings(deadline=None)
def test_a_less_urgent_request_delays_no_booking_and_a_more_urgent_one_sees_only_its_own(
    arrivals: list[tuple[float, int, float, int, str]],
) -> None:
    ledger = PromiseLedger()
    for number, (_, tokens, slack, priority, tenant) in enumerate(arrivals):
        ledger.promise(Demand(number, tenant, priority, tokens, slack), 5.0, RATE, 0.0)
    urgent = PromiseLedger()
    for number, (_, tokens, slack, priority, tenant) in enumerate(arrivals):
        if priority == 0:
            urgent.promise(Demand(number, tenant, priority, tokens, slack), 5.0, RATE, 0.0)
    demand = Demand("new", "", 0, 500, 3.0)
    assert ledger.fits(demand, 2.0, RATE, 0.0) == urgent.fits(demand, 2.0, RATE, 0.0)


def test_one_tenant_gets_half_of_the_bookings_and_leaves_room_for_others() -> None:
    ledger = PromiseLedger()
    for number in range(2 * MAX_BOOKINGS):
        assert ledger.promise(Demand(number, "anna", 0, 1, 0.0), 1.0, RATE, 0.0) >= 1
    assert len(ledger) == MAX_BOOKINGS // 2
    for number in range(2 * MAX_BOOKINGS):
        ledger.promise(Demand(("boris", number), "boris", 0, 1, 0.0), 1.0, RATE, 0.0)
    assert MAX_BOOKINGS // 2 < len(ledger) <= MAX_BOOKINGS * 3 // 4


def test_a_booking_that_is_not_claimed_expires_and_weighs_less_next_time() -> None:
    ledger, now, late = PromiseLedger(), 0.0, Demand("new", "anna", 0, 900, 1.0)
    ledger.promise(Demand(0, "anna", 0, 800, 1.0), 2.0, RATE, now)
    assert not ledger.fits(late, 0.8, RATE, 0.9), "the booking is due in 0.1 s, and must not wait longer than a second"
    for number in range(1, 40):
        ledger.expire(now := now + 10)
        assert not len(ledger)
        ledger.promise(Demand(number, "anna", 0, 800, 0.0), 2.0, RATE, now)
    assert ledger.expired == 39 and ledger.kept == 0
    assert ledger.return_share("anna") < 0.1 and ledger.return_share("boris") == 1
    ledger.promise(Demand("a", "anna", 0, 800, 1.0), 2.0, RATE, now)
    ledger.promise(Demand("b", "boris", 0, 800, 1.0), 2.0, RATE, now)
    assert ledger.promise(Demand("c", "anna", 0, 10, 0.5), 2.0, RATE, now) <= 3, "anna's bookings hardly count, boris's do"


def test_no_promise_lies_beyond_ten_minutes() -> None:
    ledger = PromiseLedger()
    assert ledger.promise(Demand(1, "", 0, 10, 0.0), 5000.0, RATE, 0.0) == 600 and not len(ledger)
