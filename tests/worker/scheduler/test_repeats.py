"""An exact repeat of a prompt is computed once: it joins the step that completes the prompt, and later takes nothing but its logits."""

import pytest
from tests.worker.scheduler.engine_model import EngineModel
from tests.worker.scheduler.overlapped import OverlappedModel
from tests.worker.scheduler.test_scheduler import finish, prompt

from fairlead_worker.scheduler.config import POLICIES

PAGE = 16
LENGTHS = [1, 3, 15, 16, 17, 32, 33, 100]


def computed(machine: EngineModel) -> int:
    """Return the tokens of prompts that were computed: rows of first steps, so not the decodes."""
    return sum(count for step in machine.plans for name, start, count in step if start < len(machine.told[name].submit.tokens) // 4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", LENGTHS)
def test_identical_prompts_are_computed_once_in_one_step(length: int, policy: str) -> None:
    machine = EngineModel(64, PAGE, kept_prompts=4, policy=policy)
    names = [machine.submit(prompt(length), 5, ignore_eos=True) for _ in range(3)]
    plan = machine.step()
    assert (plan.prefill_tokens, plan.repeats, plan.samples) == (length, 2, 3)
    finish(machine)
    assert computed(machine) == length and len(machine.plans) == 5
    assert sorted(machine.told[name].cached_tokens for name in names) == [0, length - 1, length - 1]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_later_repeat_computes_nothing(length: int) -> None:
    machine = EngineModel(64, PAGE, kept_prompts=4)
    machine.submit(prompt(length), 3, ignore_eos=True)
    finish(machine)
    before = computed(machine)
    repeat = machine.submit(prompt(length), 1)
    plan = machine.step()
    assert plan.repeats == plan.samples == 1 and not plan.prefill_tokens and not plan.decodes
    assert machine.told[repeat].finish == "length" and machine.scheduler.idle
    machine.submit(prompt(length), 40, ignore_eos=True)
    finish(machine)
    assert computed(machine) == before


def test_waiting_repeats_join_a_prompt_that_is_computed_in_chunks() -> None:
    machine = EngineModel(64, PAGE, kept_prompts=4, chunked_prefill_size=32)
    running = machine.submit(prompt(5, 7), 60, ignore_eos=True)
    machine.step()
    for _ in range(3):
        machine.submit(prompt(100), 4, ignore_eos=True)
    finish(machine)
    assert computed(machine) == 5 + 100
    assert machine.told[running].finish == "length"


def test_repeats_of_other_roots_adapters_and_scored_prompts_are_computed() -> None:
    machine = EngineModel(64, PAGE, kept_prompts=4)
    machine.submit(prompt(20), 2)
    finish(machine)
    for settings in ({"root": 2}, {"adapter": 1}, {"prompt_logprobs": 0}, {"pooling": "last"}):
        machine.plans.clear()
        machine.submit(prompt(20), 2, **settings)  # type: ignore[arg-type]  # each its own type
        finish(machine)
        assert computed(machine) >= 4, f"{settings}: at least its last page"


def test_prompts_that_were_dropped_evicted_or_reset_are_computed() -> None:
    machine = EngineModel(8, PAGE, kept_prompts=2)
    for seed in (1, 2, 3):
        machine.submit(prompt(3, seed), 2)
        finish(machine)
    machine.plans.clear()
    machine.submit(prompt(3, 1), 2)
    finish(machine)
    assert computed(machine) == 3, "only two prompts are kept"
    machine.plans.clear()
    machine.submit(prompt(3, 1), 2)
    machine.cache.clear()
    finish(machine)
    assert computed(machine) == 3, "a reset drops short prompts too"
    machine.submit(prompt(40), 2)
    finish(machine)
    machine.submit(prompt(100, 9), 20, ignore_eos=True)  # takes all pages
    finish(machine)
    machine.plans.clear()
    machine.submit(prompt(40), 2)
    finish(machine)
    assert computed(machine) >= 8, "the pages before the last one were evicted"


def test_more_prompts_than_slots_in_one_step() -> None:
    machine = EngineModel(64, PAGE, kept_prompts=1)
    for seed in (1, 2, 1, 2):
        machine.submit(prompt(17, seed), 3, ignore_eos=True)
    plan = machine.step()
    assert plan.repeats == 1, "the slot of this step's first prompt is not reused in it"
    finish(machine)


def test_a_prompt_that_two_rows_of_a_step_compute_is_kept_once() -> None:
    """Without sharing within a step, or where the second one's match was not refreshed."""
    machine = EngineModel(64, PAGE, kept_prompts=4, dedupe_tokens=0, match_refresh_limit=0)
    for _ in range(2):
        machine.submit(prompt(17), 3, ignore_eos=True)
    plan = machine.step()
    assert plan.prefill_tokens == 34 and [row.slot >= 0 for row in plan.rows] == [True, False]
    finish(machine)


def test_a_repeat_whose_token_is_late_computes_its_last_token() -> None:
    machine = OverlappedModel(64, PAGE, kept_prompts=4)
    machine.submit(prompt(32), 3, ignore_eos=True)
    finish(machine)
    late = iter([True])
    machine.stalls = lambda: next(late, False)
    machine.submit(prompt(32), 3, ignore_eos=True)
    finish(machine)
    assert machine.stalled == 1
