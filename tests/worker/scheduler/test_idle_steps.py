"""While no request decodes, a step computes as many chunks as fit into a second."""

from array import array

import pytest

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.scheduler import Scheduler

CHUNK, CHUNKS = 64, 5


def engine(rate: float) -> Scheduler:
    """An engine that has computed one prompt at `rate` tokens a second."""
    config = SchedulerConfig(max_model_len=4000, chunked_prefill_size=CHUNK, idle_prefill_chunks=CHUNKS)
    scheduler = Scheduler(config, PrefixCache(PagePool(2000, 4), 16, extend))
    ask(scheduler, "first", CHUNK)
    step(scheduler, CHUNK / rate)
    assert scheduler.idle
    return scheduler


def ask(scheduler: Scheduler, name: str, tokens: int, max_tokens: int = 1) -> None:
    prompt = array("I", [sum(name.encode()), *range(1, tokens)])
    assert scheduler.submit(Submit(name, prompt.tobytes(), Sampling(max_tokens, 0, ignore_eos=True), 1)) is None


def step(scheduler: Scheduler, seconds: float = 0.01) -> StepPlan:
    plan = scheduler.plan()
    scheduler.advance(plan, StepResult([[7] for row in plan.rows if row.samples], seconds=seconds))
    return plan


@pytest.mark.parametrize(("rate", "prefilled"), [(100_000, CHUNKS * CHUNK), (2 * CHUNK, 2 * CHUNK), (1, CHUNK)])
def test_an_idle_step_is_what_a_second_computes_up_to_its_chunks(rate: float, prefilled: int) -> None:
    scheduler = engine(rate)
    ask(scheduler, "long", 20 * CHUNK)
    assert step(scheduler).prefill_tokens == prefilled


def test_beside_decodes_a_step_is_a_chunk() -> None:
    scheduler = engine(100_000)
    ask(scheduler, "running", CHUNK, max_tokens=50)
    step(scheduler)
    ask(scheduler, "long", 20 * CHUNK)
    plan = step(scheduler)
    assert (plan.decodes, plan.prefill_tokens) == (1, CHUNK - 4), "whole pages beside the decode"


def test_prompts_that_come_together_are_one_step() -> None:
    scheduler = engine(100_000)
    for number in range(CHUNKS):
        ask(scheduler, f"wave {number}", CHUNK)
    assert step(scheduler).samples == CHUNKS
