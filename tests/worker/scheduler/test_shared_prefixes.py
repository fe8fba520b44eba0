"""A prefix that many requests share is computed once, whenever they arrive. Counted in computed tokens, not in time."""

from array import array
from collections import Counter

import pytest
from tests.worker.scheduler.engine_model import EngineModel
from tests.worker.scheduler.test_scheduler import prompt

COMMON = prompt(1024)
every_chunk = pytest.mark.parametrize("chunk", [64, 512, -1])


def machine_of(chunk: int, **config: object) -> EngineModel:
    return EngineModel(2048, 16, chunked_prefill_size=chunk, **config)


def computed(machine: EngineModel) -> Counter[tuple[int, ...]]:
    """How often each prefix that ends at a position of some prompt was computed, by its last 8 tokens and its length."""
    prompts = {name: array("I", told.submit.tokens) for name, told in machine.told.items()}
    count: Counter[tuple[int, ...]] = Counter()
    for plan in machine.plans:
        for name, start, tokens in plan:
            known = prompts[name]
            for position in range(start, min(start + tokens, len(known))):
                count[(position, *known[max(position - 7, 0) : position + 1])] += 1
    return count


def finish(machine: EngineModel) -> int:
    """To the end; the prompt tokens computed."""
    machine.run()
    machine.check_answers()
    return sum(computed(machine).values())


@every_chunk
def test_16_requests_with_one_prefix_compute_it_once(chunk: int) -> None:
    machine = machine_of(chunk)
    names = [machine.submit([*COMMON, *prompt(5 + seed % 7, 1 + seed)], 2) for seed in range(16)]
    assert finish(machine) == 1024 + sum(5 + seed % 7 for seed in range(16))
    assert sorted(machine.told[name].cached_tokens for name in names) == [0] + [1024] * 15


@every_chunk
def test_identical_prompts_too_but_for_the_last_page(chunk: int) -> None:
    """Its last token gives the first logits, so each computes that page itself."""
    machine = machine_of(chunk)
    for _ in range(16):
        machine.submit(COMMON, 2)
    assert finish(machine) == 1024 + 15 * 16


@every_chunk
@pytest.mark.parametrize("apart", [1, 3])
def test_arriving_steps_apart(chunk: int, apart: int) -> None:
    """Each comes while those before it compute, wait or decode already."""
    machine = machine_of(chunk)
    for seed in range(16):
        machine.submit([*COMMON, *prompt(9, 1 + seed)], 6, ignore_eos=True)
        for _ in range(apart):
            machine.step()
            machine.check()
    assert finish(machine) == 1024 + 16 * 9


@every_chunk
def test_prefixes_that_part_on_the_way(chunk: int) -> None:
    """One trunk of 512 tokens, four boughs of 512, four twigs on each: every part once."""
    machine = machine_of(chunk)
    for twig in range(4):
        for bough in range(4):
            machine.submit([*COMMON[:512], *prompt(512, 10 + bough), *prompt(7, 100 + 4 * bough + twig)], 2)
    assert finish(machine) == 512 + 4 * 512 + 16 * 7
    assert set(computed(machine).values()) == {1}


@every_chunk
def test_prompts_of_which_some_are_prefixes_of_others(chunk: int) -> None:
    """What a shorter one has filled is found by the longer ones, and the other way round."""
    machine = machine_of(chunk)
    for length in (1024, 200, 700, 33, 512):
        machine.submit([*COMMON[:length], 7], 2)
    finish(machine)
    whole_pages = {position: times for (position, *_), times in computed(machine).items() if position < 1024}
    assert all(whole_pages[position] <= 2 for position in range(1024))
    assert sum(whole_pages.values()) <= 1024 + 4 * 17, "a page at the end of each, and its own last token"


def test_a_prefix_on_the_host_is_loaded_once_for_all() -> None:
    machine = EngineModel(140, 16, host_slots=100, chunked_prefill_size=512)
    machine.submit([*COMMON, 1], 1)
    machine.run()
    machine.submit(prompt(140 * 16 - 1, 7), 1)
    machine.run()
    machine.plans.clear()
    before = machine.scheduler.load().host
    for seed in range(16):
        machine.submit([*COMMON, *prompt(5, 1 + seed)], 2)
    assert finish(machine) == 16 * 5
    after = machine.scheduler.load().host
    assert before is not None and after is not None
    assert (before.loaded, after.loaded) == (0, 64) and after.cached_tokens == 1024
