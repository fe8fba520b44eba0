"""The rate of arrivals that a worker reports."""

import pytest

from fairlead_index.arrival_rate import WINDOW_SECONDS, ArrivalRate


def test_the_rate_is_right_from_the_first_seconds_on_and_follows_changes() -> None:
    rate = ArrivalRate()
    assert rate.per_second(100.0) == 0.0
    for number in range(1, 1001):
        rate.record(100.0 + number / 5)
        if number > 10:
            assert rate.per_second(100.0 + number / 5) == pytest.approx(5, rel=0.15)
    for number in range(1, 101):
        rate.record(300.0 + number)
    assert rate.per_second(400.0) == pytest.approx(1, rel=0.1)
    assert rate.per_second(400.0 + 5 * WINDOW_SECONDS) < 0.02


def test_the_first_arrivals_are_averaged_over_a_second() -> None:
    rate = ArrivalRate()
    for _ in range(3):
        rate.record(7.0)
    assert rate.per_second(7.0) == pytest.approx(3, rel=0.06)
