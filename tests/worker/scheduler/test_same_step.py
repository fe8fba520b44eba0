"""A prefix is shared within the step that computes it: a wave of prompts needs one step and gets the same answers, also after aborts."""

from collections.abc import Callable

import pytest
from tests.worker.scheduler.engine_model import EngineModel
from tests.worker.scheduler.overlapped import OverlappedModel
from tests.worker.scheduler.test_scheduler import finish, prompt, rows

from fairlead_common.scheduling_policy import POLICIES

COMMON = prompt(1024)


def prefills(machine: EngineModel) -> list[dict[str, tuple[int, int]]]:
    """The rows with more than one token of each step that has any: start and count by name."""
    steps = [{name: (start, count) for name, start, count in step if count > 1} for step in machine.plans]
    return [step for step in steps if step]


def wave(machine: EngineModel) -> list[str]:
    """8 prompts of 256 tokens, each of 4 prefixes of 192 tokens twice."""
    return [machine.submit([*prompt(192, number % 4), *prompt(64, 10 + number)], 5, ignore_eos=True) for number in range(8)]


def late(machine: OverlappedModel) -> None: ...


def early(machine: OverlappedModel) -> None:
    machine.between = machine.device.catch_up


@pytest.mark.parametrize("policy", POLICIES)
def test_a_wave_over_a_few_prefixes_is_one_step(policy: str) -> None:
    machine = EngineModel(256, 16, idle_prefill_chunks=5, policy=policy)
    machine.seconds = lambda plan: 0.001  # so that a second has room for five chunks
    machine.submit(prompt(40, 99), 1)
    machine.run()
    machine.plans.clear()
    names = wave(machine)
    finish(machine)
    assert prefills(machine) == [{name: (0, 256) if place < 4 else (192, 64) for place, name in enumerate(names)}]
    assert [machine.told[name].cached_tokens for name in names] == [0] * 4 + [192] * 4
    assert len(machine.plans) == 5, "and they decode together"
    load = machine.scheduler.load()
    assert (load.prompt_tokens, load.cached_tokens) == (40 + 8 * 256, 4 * 192)


def test_64_prompts_with_one_prefix_are_one_step() -> None:
    machine = EngineModel(2048, 16, chunked_prefill_size=0)
    names = [machine.submit([*COMMON, *prompt(5 + seed % 7, 1 + seed)], 2) for seed in range(64)]
    plan = machine.step()
    assert len(plan.rows) == 64 and plan.prefill_tokens == 1024 + sum(5 + seed % 7 for seed in range(64))
    finish(machine)
    assert [machine.told[name].cached_tokens for name in names] == [0] + [1024] * 63


@pytest.mark.parametrize("device", [late, early])
def test_in_the_overlapped_loop_too(device: Callable[[OverlappedModel], None]) -> None:
    machine = OverlappedModel(256, 16, chunked_prefill_size=0)
    device(machine)
    names = wave(machine)
    machine.run()
    machine.rest()
    machine.check_answers()
    assert [set(step) for step in prefills(machine)] == [set(names)]
    assert [machine.told[name].cached_tokens for name in names] == [0] * 4 + [192] * 4


def test_prompts_that_share_a_prefix_with_a_chunked_one_wait_for_it() -> None:
    machine = EngineModel(256, 16, chunked_prefill_size=256)
    leader, *others = [machine.submit([*COMMON[:600], *prompt(10, 1 + seed)], 2) for seed in range(4)]
    finish(machine)
    last = {leader: (512, 98)} | dict.fromkeys(others, (592, 18))
    assert prefills(machine) == [{leader: (0, 256)}, {leader: (256, 256)}, last], "600 tokens are 37 pages and a part of one"
    assert [machine.told[name].cached_tokens for name in (leader, *others)] == [0, 592, 592, 592]


def test_followers_of_followers() -> None:
    """Each attaches where the ones before it in the step have come to, wherever they part."""
    machine = EngineModel(1024, 4, chunked_prefill_size=0, policy="fcfs")
    lengths = {"trunk": (0, 0), "early": (100, 0), "late": (400, 100), "same": (400, 400), "on": (800, 400)}
    for place, (name, (shared, _)) in enumerate(lengths.items()):
        machine.submit([*COMMON[:shared], *(COMMON[shared:400] if name == "trunk" else prompt(60, 1 + place))], 2, name=name)
    machine.submit([*COMMON[:800], *prompt(9, 50)], 2, name="last")
    finish(machine)
    assert {name: start for name, (start, _) in prefills(machine)[0].items()} == {
        "trunk": 0,
        "early": 100,
        "late": 396,  # of the last page the position is left that is computed again if its token does not come
        "same": 400,
        "on": 400,
        "last": 800,
    }


def test_shorter_prefixes_than_asked_for_are_not_shared_within_a_step() -> None:
    for tokens, length, start in ((40, 32, 0), (40, 60, 60), (0, 60, 0)):
        machine = EngineModel(64, 4, dedupe_tokens=tokens)
        first, second = (machine.submit([*COMMON[:length], last, last], 2) for last in range(2))
        finish(machine)
        assert prefills(machine) == [{first: (0, length + 2), second: (start, length + 2 - start)}]


@pytest.mark.parametrize("model", [EngineModel, OverlappedModel])
@pytest.mark.parametrize("leaders", [1, 3])
def test_sharing_requests_continue_when_the_first_one_is_aborted_in_that_step(model: type[EngineModel], leaders: int) -> None:
    """Its row is computed all the same, and its pages are theirs."""
    machine = model(64, 16, chunked_prefill_size=0)
    names = [machine.submit([*COMMON[:200], *prompt(9, 1 + seed)], 8, ignore_eos=True) for seed in range(5)]
    machine.step(abort_in_flight=names[0])
    for name in names[1:leaders]:
        machine.abort(name)
    machine.run()
    if isinstance(machine, OverlappedModel):
        machine.rest()
    machine.check()
    machine.check_answers()
    assert [machine.told[name].cached_tokens for name in names[leaders:]] == [192] * (5 - leaders)
    assert len(prefills(machine)) == 1
    assert machine.cache.available == 64 and machine.cache.pool.leased == 0
    again = machine.submit([*COMMON[:200], 7], 1)
    machine.run()
    assert machine.told[again].cached_tokens == 192


@pytest.mark.parametrize("model", [EngineModel, OverlappedModel])
def test_sharing_requests_can_be_preempted(model: type[EngineModel]) -> None:
    machine = model(24, 4, chunked_prefill_size=0, initial_new_token_ratio=0.0)
    names = [machine.submit([*COMMON[:40], *prompt(3, 1 + seed)], 25, ignore_eos=True) for seed in range(4)]
    machine.step()
    assert len(machine.scheduler.running) == 4, "10 pages and one for each"
    machine.run()
    machine.check_answers()
    assert machine.scheduler.stats.preemptions > 0
    assert [machine.told[name].cached_tokens for name in names] == [0, 40, 40, 40]
    if isinstance(machine, OverlappedModel):
        machine.rest()
    assert machine.cache.available == 24


def test_a_scored_prompt_shares_its_pages_and_reuses_none() -> None:
    machine = EngineModel(128, 4, chunked_prefill_size=0)
    scored = [machine.submit([*COMMON[:80], 1], 2, prompt_logprobs=0) for _ in range(2)]
    others = [machine.submit([*COMMON[:80], *prompt(5, 1 + seed)], 2) for seed in range(2)]
    finish(machine)
    assert prefills(machine) == [dict.fromkeys(scored, (0, 81)) | dict.fromkeys(others, (80, 5))]
    assert [machine.told[name].scores for name in scored] == [list(range(80))] * 2


def test_a_pooled_prompt_shares_its_pages_and_reuses_none() -> None:
    """The mean wants the states of all positions, the last one only its own."""
    machine = EngineModel(128, 4, chunked_prefill_size=0)
    means = [machine.submit(COMMON[:80], pooling="mean") for _ in range(2)]
    last = machine.submit(COMMON[:80], pooling="last")
    other = machine.submit([*COMMON[:80], 5, 6], 2)
    machine.run()
    machine.check_answers()
    assert rows(machine, 0) == dict.fromkeys(means, (0, 80)) | {last: (76, 4), other: (80, 2)}
    assert [machine.told[name].pooled for name in (*means, last)] == [list(range(80))] * 2 + [[79]]


def test_behind_a_prefix_that_comes_back_from_the_host() -> None:
    """The leader has it loaded, and computes the rest; the other has both of it in the same step."""
    machine = EngineModel(40, 4, host_slots=40, chunked_prefill_size=0)
    machine.submit([*COMMON[:41]], 1)
    machine.run()
    machine.submit(prompt(159, 1), 1)
    machine.run()
    names = [machine.submit([*COMMON[:80], *prompt(3, 2 + seed)], 2) for seed in range(3)]
    plan = machine.step()
    assert len(plan.loads) == 10
    finish(machine)
    assert prefills(machine)[-1] == {names[0]: (40, 43), names[1]: (80, 3), names[2]: (80, 3)}
    assert [machine.told[name].cached_tokens for name in names] == [40, 80, 80]


def test_other_roots_share_nothing() -> None:
    machine = EngineModel(128, 4, chunked_prefill_size=0)
    names = [machine.submit([*COMMON[:80], 1, 2], 2, root=root) for root in (1, 2, 2)]
    finish(machine)
    assert prefills(machine) == [{names[0]: (0, 82), names[1]: (0, 82), names[2]: (80, 2)}]
