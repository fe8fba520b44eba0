"""The engine's measured speeds."""

import pytest

from fairlead_worker.scheduler.stats import EngineStats


def test_an_idle_worker_reports_its_fastest_decode_not_how_busy_it_was() -> None:
    stats = EngineStats()
    assert stats.step_seconds(is_running=False) == 0.0
    stats.record_step(0, 1, 0.01)
    for _ in range(50):
        stats.record_step(0, 64, 0.06)
    assert stats.step_seconds(is_running=True) == pytest.approx(0.06, rel=0.01)
    assert stats.step_seconds(is_running=False) == 0.01
