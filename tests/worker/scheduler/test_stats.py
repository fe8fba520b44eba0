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


def test_the_prefill_rate_is_that_of_full_chunks_whatever_the_steps_held() -> None:
    """Steps of 5 ms and 20 us for each token: chunks of 512 take 15.24 ms."""
    stats = EngineStats(512)
    assert stats.prefill_rate == 0.0
    stats.record_warmup_decode(0.02)  # the first was slow
    stats.record_warmup_decode(0.005)
    stats.record_warmup(2048, 0.005 + 2048 * 2e-5)
    assert stats.prefill_rate == pytest.approx(512 / 0.01524)
    for _ in range(3000):
        stats.record_step(16, 0, 0.005 + 16 * 2e-5)
    assert stats.prefill_rate == pytest.approx(512 / 0.01524), "small steps: the prompts are nearly all cached"


def test_the_prefill_rate_ignores_a_pause_and_follows_a_slower_machine() -> None:
    stats = EngineStats(512)
    stats.record_warmup_decode(0.001)
    stats.record_warmup(512, 0.011)
    usual = stats.prefill_rate
    stats.record_step(64, 0, 5.0)
    assert stats.prefill_rate > 0.95 * usual
    for _ in range(30):
        stats.record_step(512, 0, 0.11)
    assert stats.prefill_rate < 0.15 * usual


def test_without_decodes_the_prefill_rate_is_tokens_by_seconds() -> None:
    stats = EngineStats(512)
    for tokens in (100, 600, 400):
        stats.record_step(tokens, 0, tokens * 1e-4)
    assert stats.prefill_rate == pytest.approx(1e4)
