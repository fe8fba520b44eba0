"""Start-up phases and their times in the log, `/ready` and metrics."""

import pytest

from fairlead_worker.api.engine.start_up import StartUp


def test_phases_are_timed_in_the_order_in_which_they_come() -> None:
    start = StartUp(100.0)
    for phase, now in (
        ("imports", 101.0),
        ("weights", 104.0),
        ("weights", 110.0),
        ("compile", 114.0),
        ("cache", 116.5),
        ("compile", 117.0),
    ):
        start.enter(phase, now)
    assert start.finish(118.0) == "18.0 s from its start: start 1.0, imports 3.0, weights 10.0, compile 3.5, cache 0.5"
    start.join(118.4)
    assert start.seconds["join"] == pytest.approx(0.4)
    assert sum(start.seconds.values()) == pytest.approx(18.4), "nothing is counted twice"
