"""Prompts less urgent than requests that still arrive: smaller chunks, and no place in a larger step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_worker.scheduler.background import PREFILL_PER_DECODE, RECENT_STEPS, Urgency, background_budget
from fairlead_worker.scheduler.chunk_sizer import ChunkSizer, PrefillBudget, prefill_work
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import StepPlan
from fairlead_worker.scheduler.stats import EngineStats

PAGE, CHUNK, BATCH = 4, 256, 9
TOKEN, DECODE = 0.001, 0.02
LIMIT = int(PREFILL_PER_DECODE * DECODE / TOKEN)


def engine(**config: object) -> EngineModel:
    """An engine that knows the time of its steps."""
    model = EngineModel(40_000, PAGE, **{"chunked_prefill_size": CHUNK, **config})
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


def test_beside_urgent_requests_a_batch_gets_small_chunks() -> None:
    model = engine()
    model.submit(prompt(1, 40), 1, name="chat")
    model.step()
    model.submit(prompt(2, 3 * CHUNK), name="batch", priority=BATCH)
    assert rows(model.step()) == {"batch": LIMIT}
    model.run()


def test_an_urgent_prompt_does_not_share_a_larger_step() -> None:
    model = engine()
    model.submit(prompt(1, 100), name="batch", priority=BATCH)
    model.submit(prompt(2, 120), name="chat")
    model.submit(prompt(3, 100), name="other chat")
    assert rows(model.step()) == {"chat": 120, "other chat": 100}, "equals share the chunk"
    assert rows(model.step()) == {"chat": 1, "other chat": 1, "batch": LIMIT}
    model.run()


def test_a_small_urgent_step_is_filled_up() -> None:
    model = engine()
    model.submit(prompt(1, 100), name="batch", priority=BATCH)
    model.submit(prompt(2, 20), name="chat")
    assert rows(model.step()) == {"chat": 20, "batch": LIMIT - 20}
    model.run()


@pytest.mark.parametrize("urgent", [16, 64, CHUNK, 3 * CHUNK])
@pytest.mark.parametrize("output", [1, 4, 60])
def test_less_urgent_work_gets_one_turn_in_max_bypass_and_no_more(urgent: int, output: int) -> None:
    """The oldest request gets a chunk when its turn comes, although it is background: also in idle steps, which hold several."""
    model = engine(max_bypass=8, idle_prefill_chunks=5)
    model.submit(prompt(1, 20_000), 1, name="batch", priority=BATCH)
    batch = chats = 0
    while chats < 120 * CHUNK:
        while model.scheduler.waiting.tokens < 20_000 + 5 * CHUNK:
            model.submit(prompt(len(model.told) + 2, urgent), output, ignore_eos=True)
        plan = model.step()
        counts = {row.request.id: row.count for row in plan.rows if row.start < row.request.prompt_length}
        batch += counts.pop("batch", 0)
        chats += sum(counts.values())
    assert 7 < chats / batch < 10


def test_an_urgent_request_does_not_wait_for_a_middle_class_while_another_is_due() -> None:
    model = engine(max_bypass=2)
    model.submit(prompt(1, 2000), 1, name="batch", priority=BATCH)
    for _ in range(3):
        model.submit(prompt(len(model.told) + 1, 4000), 1, priority=5)
        model.step()
    waits = []
    for _ in range(20):
        chat = model.submit(prompt(len(model.told) + 1, 50), 1)
        waits.append(0)
        while not model.told[chat].tokens and waits[-1] < 30:
            model.step()
            waits[-1] += 1
        model.step()
    assert max(waits) <= 3, waits


def test_a_preempted_request_is_resumed_under_a_permanent_stream_of_urgent_ones() -> None:
    """Urgent prompts that do not fit are yielded first in each step."""
    model = EngineModel(60, PAGE, chunked_prefill_size=64, max_bypass=4)
    model.submit(prompt(1, 40), 60, name="batch", priority=BATCH, ignore_eos=True)
    for _ in range(5):
        model.step()
    scheduler = model.scheduler
    scheduler.preempt(batch := scheduler._requests["batch"])
    scheduler.waiting.add(batch, lost_pages=True)
    for _ in range(400):
        while len(scheduler.waiting) < 6:
            model.submit(prompt(len(model.told) + 2, 100), 6, ignore_eos=True)
        model.step()
        if model.told["batch"].finish:
            return
    raise AssertionError("the batch request never ended")


def test_a_preempted_background_prompt_is_admitted_beside_urgent_ones() -> None:
    model = engine()
    model.submit(prompt(1, 100), 300, name="batch", priority=BATCH, ignore_eos=True)
    model.step()
    scheduler = model.scheduler
    batch = scheduler._requests["batch"]
    scheduler.preempt(batch)
    scheduler.waiting.add(batch, lost_pages=True)
    model.submit(prompt(2, 100), 1)
    assert "batch" in rows(model.step()) | rows(model.step()), "its last token is its turn after 64 tokens"
    model.run()


def test_a_middle_class_does_not_hide_a_more_urgent_one() -> None:
    urgency = Urgency()
    assert not urgency.is_background(BATCH, 0), "nothing has arrived"
    urgency.record(0, 10)
    urgency.record(5, 200)
    urgency.record(BATCH, 201)
    assert urgency.is_background(5, 10 + RECENT_STEPS) and not urgency.is_background(5, 11 + RECENT_STEPS)
    assert urgency.is_background(BATCH, 200 + RECENT_STEPS) and not urgency.is_background(BATCH, 201 + RECENT_STEPS)
    assert not urgency.is_background(0, 11)


@settings(deadline=None, max_examples=200)
@given(arrivals=st.lists(st.tuples(st.integers(0, 150), st.integers(-3, 3)), max_size=30), priority=st.integers(-3, 4))
def test_urgency_is_the_last_arrival_of_a_more_urgent_request(arrivals: list[tuple[int, int]], priority: int) -> None:
    urgency, step, told = Urgency(), 0, []
    for pause, arrived in arrivals:
        step += pause
        urgency.record(arrived, step)
        told.append((arrived, step))
    expected = any(arrived < priority and step - at <= RECENT_STEPS for arrived, at in told)
    assert urgency.is_background(priority, step) == expected


def budget(stats: EngineStats, sizer: ChunkSizer | None = None) -> PrefillBudget | None:
    return background_budget(stats, sizer, PAGE, 8192)


def test_the_budget_follows_recent_decodes() -> None:
    stats = EngineStats(CHUNK)
    assert budget(stats) is None, "unknown"
    stats.record_warmup_decode(DECODE)
    stats.record_warmup(CHUNK, DECODE + TOKEN * CHUNK)
    for decodes, seconds in (0, DECODE), (8, 2 * DECODE):
        for _ in range(100 * bool(decodes)):
            stats.record_step(0, decodes, seconds)
        found = budget(stats)
        assert found is not None and found.count_fitting(0) == pytest.approx(PREFILL_PER_DECODE * seconds / TOKEN, rel=0.05)


def test_far_into_a_prompt_a_chunk_is_shorter_because_attention_costs_more() -> None:
    stats, sizer = EngineStats(CHUNK), ChunkSizer(SchedulerConfig(max_model_len=20_000, itl_target_ms=500), PAGE)
    for number in range(40):
        start, count, decodes = 200 * number, 8 + 8 * (number % 5), number % 3
        work = prefill_work(start, count)
        sizer.observe((work, count, 0.0, decodes, 1.0), DECODE + TOKEN * count + 1e-6 * work)
        sizer.observe((0.0, 0.0, 0.0, 1.0, 1.0), DECODE)
    stats.record_warmup_decode(DECODE)
    stats.record_warmup(CHUNK, DECODE + TOKEN * CHUNK)
    found = budget(stats, sizer)
    assert found is not None
    assert found.count_fitting(0) == pytest.approx(78, rel=0.1) and found.count_fitting(9000) == pytest.approx(8, abs=1)


def test_a_step_has_a_page_for_background_prompts_at_least() -> None:
    model = engine()
    stats = model.scheduler.stats
    for _ in range(100):
        stats.record_step(0, 1, TOKEN / 100)
    model.submit(prompt(1, 40), 1)
    model.step()
    model.submit(prompt(2, 3 * CHUNK), name="batch", priority=BATCH)
    assert rows(model.step()) == {"batch": PAGE}


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_odd_step_times_set_no_limit(seconds: float) -> None:
    stats = EngineStats(CHUNK)
    stats.record_step(0, 1, seconds)
    stats.record_step(100, 0, seconds)
    assert budget(stats) is None


@settings(deadline=None, max_examples=25)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400), st.sampled_from([0, 1, BATCH])), min_size=1, max_size=40),
    config=st.sampled_from(
        [{}, {"speculative_method": "ngram"}, {"chunked_prefill_size": -1}, {"enable_mixed_chunk": False}, {"prefill_max_requests": 1}]
    ),
)
def test_every_prompt_is_computed_and_its_answer_is_that_of_an_idle_engine(
    arrivals: list[tuple[int, int, int]], config: dict[str, object]
) -> None:
    """The model checks pages and tokens in each step."""
    model = engine(**{"max_bypass": 4, **config})
    for number, (pause, tokens, priority) in enumerate(arrivals):
        for _ in range(pause):
            if not model.scheduler.idle:
                model.step()
        model.submit(prompt(number, tokens), 3, priority=priority)
    model.run()
    model.check_answers()
