"""The measured time of a decode step."""

import pytest

from fairlead_agent.engine.step_time import StepTime


def test_tokens_that_waited_for_prefill_do_not_count() -> None:
    """With the mean of the last scrape, conversations left an engine that had just computed other prompts."""
    step = StepTime()
    assert step.seconds(0.0) == 0, "unknown"
    step.record(1.0, 0.4, 40)
    step.record(1.5, 10.0, 40)
    assert step.seconds(1.5) == 0.01


def test_a_slower_engine_is_noticed() -> None:
    step = StepTime()
    step.record(1.0, 0.4, 40)
    for number in range(25):
        step.record(1.5 + number / 2, 2.0, 40)
    assert step.seconds(13.5) == 0.05
    assert step.seconds(100.0) == 0.05, "nothing newer is known"


def test_a_slow_step_ends_with_the_next_fast_one() -> None:
    step = StepTime()
    for number in range(20):
        step.record(number / 2, 10.0, 40)
    step.record(10.0, 5.0, 4)
    step.pause()
    step.record(60.0, 0.08, 8)
    assert step.seconds(60.0) == pytest.approx(0.01)


def test_a_sum_of_zero_is_no_measurement() -> None:
    step = StepTime()
    step.record(1.0, 0.0, 40)
    step.record(1.5, 0.8, 40)
    assert step.seconds(1.5) == pytest.approx(0.01)
