"""The pace of a worker follows its first tokens, and is never faster than its reported rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_router.fleet.prefill_pace import SLOWEST, PrefillPace


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=50))
def test_the_pace_has_bounds(answers: list[tuple[float, float]]) -> None:
    pace = PrefillPace()
    assert pace.value == 1
    for expected, actual in answers:
        pace.record(expected, actual)
        assert 1 <= pace.value <= SLOWEST


def test_the_pace_follows_and_recovers() -> None:
    pace = PrefillPace()
    for _ in range(5):
        pace.record(0.01, 5.0)
        pace.record(0.2, 0.4)
        pace.record(1.8, 2.7)
    assert pace.value == pytest.approx(1.55), "long waits count more, and the shortest do not count"
    for _ in range(100):
        pace.record(1.0, 0.9)
    assert pace.value == pytest.approx(1.0, abs=0.03)
