"""Prompts less urgent than requests that still arrive: smaller chunks, and no place in a larger step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_worker.scheduler.background import RECENT_STEPS, Urgency
from fairlead_worker.scheduler.plan import StepPlan
from fairlead_worker.scheduler.stats import EFFICIENT, EngineStats

PAGE, CHUNK, BATCH = 4, 256, 9
TOKEN, DECODE = 0.001, 0.02
EFFICIENT_TOKENS = int(EFFICIENT * DECODE / TOKEN)


def engine(**config: object) -> EngineModel:
    """An engine that knows the time of its steps."""
    model = EngineModel(4000, PAGE, chunked_prefill_size=CHUNK, **config)
    model.seconds = lambda plan: DECODE + TOKEN * plan.prefill_tokens
    model.scheduler.stats.record_warmup_decode(DECODE)
    model.scheduler.stats.record_warmup(CHUNK, DECODE + TOKEN * CHUNK)
    return model


def prompt(number: int, tokens: int) -> list[int]:
    return [number, *range(1, tokens)]


def rows(plan: StepPlan) -> dict[str, int]:
    return {row.request.id: row.count for row in plan.rows}


def test_without_urgent_requests_a_batch_gets_whole_chunks() -> None:
    model = engine()
    model.submit(prompt(1, 3 * CHUNK), name="batch", priority=BATCH)
    assert rows(model.step()) == {"batch": CHUNK}


def test_beside_urgent_requests_a_batch_gets_efficient_chunks() -> None:
    model = engine()
    model.submit(prompt(1, 40), 1, name="chat")
    model.step()
    model.submit(prompt(2, 3 * CHUNK), name="batch", priority=BATCH)
    assert rows(model.step()) == {"batch": EFFICIENT_TOKENS}
    model.run()


def test_an_urgent_prompt_does_not_share_a_larger_step() -> None:
    model = engine()
    model.submit(prompt(1, 100), name="batch", priority=BATCH)
    model.submit(prompt(2, 120), name="chat")
    model.submit(prompt(3, 100), name="other chat")
    assert rows(model.step()) == {"chat": 120, "other chat": 100}, "equals share the chunk"
    assert rows(model.step()) == {"chat": 1, "other chat": 1, "batch": EFFICIENT_TOKENS}
    model.run()


def test_a_small_urgent_step_is_filled_up() -> None:
    model = engine()
    model.submit(prompt(1, 100), name="batch", priority=BATCH)
    model.submit(prompt(2, 20), name="chat")
    assert rows(model.step()) == {"chat": 20, "batch": EFFICIENT_TOKENS - 20}
    model.run()


def test_policies_without_priorities_know_no_background() -> None:
    model = engine(policy="fcfs")
    model.submit(prompt(1, 40), 1, name="chat")
    model.submit(prompt(2, 3 * CHUNK), name="batch", priority=BATCH)
    assert rows(model.step()) == {"chat": 40, "batch": CHUNK - 40}
    model.run()


def test_urgency_ends_after_some_steps() -> None:
    urgency = Urgency()
    assert not urgency.is_background(BATCH, 0), "nothing has arrived"
    urgency.record(0, 10)
    urgency.record(BATCH, 11)
    assert urgency.is_background(BATCH, 10 + RECENT_STEPS) and not urgency.is_background(0, 10)
    assert not urgency.is_background(BATCH, 11 + RECENT_STEPS)
    urgency.record(5, 11 + RECENT_STEPS)
    assert urgency.is_background(BATCH, 12 + RECENT_STEPS) and not urgency.is_background(5, 12 + RECENT_STEPS)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_odd_step_times_set_no_limit(seconds: float) -> None:
    stats = EngineStats(CHUNK)
    assert stats.efficient_tokens == 0
    stats.record_step(0, 1, seconds)
    stats.record_step(100, 0, seconds)
    assert stats.efficient_tokens == 0


@settings(deadline=None, max_examples=60)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400), st.sampled_from([0, 1, BATCH])), min_size=1, max_size=40),
    speculation=st.booleans(),
)
def test_every_prompt_ends_and_none_waits_behind_more_than_the_bound(arrivals: list[tuple[int, int, int]], speculation: bool) -> None:
    """The model checks pages and tokens. A prompt is passed `max_bypass` times at most, whatever its class."""
    model = engine(max_bypass=4)
    for number, (pause, tokens, priority) in enumerate(arrivals):
        for _ in range(pause):
            if not model.scheduler.idle:
                model.step()
        model.submit(prompt(number, tokens), 3, priority=priority)
    model.run()
    assert all(answer.finish == "length" or answer.finish == "stop" for answer in model.told.values())
