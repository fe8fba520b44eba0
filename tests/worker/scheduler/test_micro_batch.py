"""Prefill micro-batching, its limit, and the dedupe beside it: how many prompts one step computes."""

import random

import pytest
from tests.worker.scheduler.engine_model import EngineModel


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100, 1000), k=length)


def prefills(machine: EngineModel) -> list[list[str]]:
    """Names of the prompts in each step so far."""
    return [[name for name, _, count in step if count > 1] for step in machine.plans]


def test_misses_of_one_step_are_one_forward_pass_and_hits_attach() -> None:
    machine = EngineModel(256, 4)
    warm = machine.submit(prompt(41), 1)
    machine.run()
    hit = machine.submit([*prompt(40), 7, 8], 1)
    misses = [machine.submit(prompt(20, seed), 1) for seed in (1, 2, 3)]
    machine.run()
    machine.check_answers()
    assert prefills(machine) == [[warm], [hit, *misses]]
    assert machine.told[hit].cached_tokens == 40


def test_a_limit_on_prompts_of_a_step_holds_and_decodes_ride_along() -> None:
    machine = EngineModel(256, 4, prefill_max_requests=1, policy="fcfs")
    names = [machine.submit(prompt(20, seed), 6, ignore_eos=True) for seed in range(4)]
    machine.run()
    machine.check_answers()
    assert prefills(machine)[:4] == [[name] for name in names]
    assert [len(step) for step in machine.plans[:4]] == [1, 2, 3, 4]


def test_the_open_chunk_counts_for_the_prompt_limit() -> None:
    machine = EngineModel(256, 4, prefill_max_requests=2, chunked_prefill_size=64, policy="fcfs")
    long = machine.submit(prompt(80), 3)
    others = [machine.submit(prompt(8, seed), 3) for seed in (1, 2)]
    machine.run()
    assert prefills(machine)[:3] == [[long], [long, others[0]], [others[1]]]


@pytest.mark.parametrize("chunk", [0, 16])
def test_the_prompt_limit_holds_without_chunks_and_with_an_itl_target(chunk: int) -> None:
    machine = EngineModel(256, 4, prefill_max_requests=2, chunked_prefill_size=chunk, itl_target_ms=20 if chunk else 0)
    for seed in range(30):
        machine.submit(prompt(10, seed), 12, ignore_eos=True)
    machine.run()
    machine.check_answers()
    assert max(len(names) for names in prefills(machine)) == 2


def test_without_dedupe_a_common_prefix_is_computed_by_each() -> None:
    computed = {}
    for tokens in (8, 0):
        machine = EngineModel(256, 4, dedupe_tokens=tokens)
        for last in range(4):
            machine.submit([*prompt(40), last, last], 2)
        machine.run()
        machine.check_answers()
        computed[tokens] = sum(count for step in machine.plans for _, _, count in step if count > 1)
        load = machine.scheduler.load()
        assert load.cached_tokens == (120 if tokens else 0)
    assert computed == {8: 40 + 4 * 2, 0: 4 * 42}


def test_pages_that_a_decode_fills_are_cached_by_the_block_and_when_it_ends() -> None:
    machine = EngineModel(64, 4, block_pages=4)
    name = machine.submit(prompt(9), 20, ignore_eos=True)
    shared = []
    while not machine.scheduler.idle:
        machine.step()
        machine.check()
        shared += [request.lease.shared for request in machine.scheduler.running]
    assert sorted(set(shared)) == [2, 4], "the prompt's two pages, then the first block of 16 tokens"
    assert machine.cache.pool.cached == 7, "28 of 29 tokens were computed"
    machine.submit(prompt(9) + machine.told[name].tokens, 1)
    machine.run()
    assert machine.told["r1"].cached_tokens == 28


def test_pages_that_a_decode_filled_are_cached_when_it_is_aborted() -> None:
    machine = EngineModel(64, 4, block_pages=4)
    name = machine.submit(prompt(9), 40, ignore_eos=True)
    for _ in range(5):
        machine.step()
    machine.abort(name)
    machine.check()
    assert machine.cache.pool.cached == 3 and machine.cache.pool.leased == 0
