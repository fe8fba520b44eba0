"""Steps launched before the last one is read: the same answers and no lost page, for any arrivals, ends and late masks."""

from collections.abc import Callable

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.worker.scheduler.engine_model import EngineModel
from tests.worker.scheduler.overlapped import OverlappedModel
from tests.worker.scheduler.test_invariants import cache_groups, events, often, play

from fairlead_common.scheduling_policy import POLICIES
from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.step_outputs import StepOutputs


def stall_at(machine: EngineModel, number: int) -> Callable[..., bool]:
    """No row of the result `number` (from 1) gets its token. What it returns: whether there were so many results, or others."""
    results = 0

    def late(result: StepResult) -> StepResult:
        nonlocal results
        results += 1
        if results == number:
            result.tokens = [[] for _ in result.tokens]
        return result

    if isinstance(machine, OverlappedModel):
        reconcile = machine.ahead.reconcile
        machine.ahead.reconcile = lambda plan, read: reconcile(plan, lambda: late(read()))  # type: ignore[method-assign]
    else:
        forward = machine._forward
        machine._forward = lambda plan, pending=None: late(forward(plan, pending))  # type: ignore[method-assign]
    return lambda so_many=number: results >= so_many


def prompt(length: int, seed: int = 0) -> list[int]:
    return [1 + (seed * 7 + i * 5) % 39 for i in range(length)]


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_decodes_are_launched_without_their_tokens(late: bool) -> None:
    machine = OverlappedModel(64, 4)
    if not late:
        machine.between = machine.device.catch_up
    names = [machine.submit(prompt(9, seed), 12, ignore_eos=True) for seed in range(3)]
    machine.run()
    machine.rest()
    machine.check_answers()
    assert all(len(machine.told[name].tokens) == 12 for name in names)
    assert machine.launched == 12, "a request at its maximum length is in no further step"
    assert machine.discarded == 0


def test_rows_of_finished_requests_in_a_launched_step_are_discarded() -> None:
    machine = OverlappedModel(64, 4)
    for seed in range(12):
        machine.submit(prompt(9, seed), 60)
    machine.run()
    machine.rest()
    machine.check_answers()
    stopped = [told for told in machine.told.values() if told.finish == "stop"]
    assert stopped and machine.discarded >= len(stopped)


def test_pages_of_an_aborted_request_are_freed_when_the_launched_step_ends() -> None:
    machine = OverlappedModel(64, 4)
    name = machine.submit(prompt(9), 60, stop_token_ids=(), ignore_eos=True)
    for _ in range(4):
        machine.step()
    free = machine.cache.available
    machine.abort(name)
    assert len(machine.scheduler.deferred_frees) == 1 and machine.cache.available == free
    machine.rest()
    assert machine.cache.available == 64


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("length", [7, 8])
def test_blocks_that_a_decode_fills_are_published_while_it_runs(length: int, scored: bool) -> None:
    machine = OverlappedModel(64, 4)  # blocks of 8 tokens
    reconcile = machine.ahead.reconcile

    def scores(result: StepResult) -> StepResult:
        result.logprobs = [(TokenLogprobs(-1.0),) for _ in result.tokens]
        return result

    if scored:  # then it is no plain decode
        machine.ahead.reconcile = lambda plan, read: reconcile(plan, lambda: scores(read()))  # type: ignore[method-assign]
    name = machine.submit(prompt(length), 30, ignore_eos=True)
    told: list[int] = []
    while machine.told[name].finish is None:
        machine.step()
        told += [len(machine.told[name].tokens)] * (len(machine.cache.block_hashes()) - len(told))
    assert told == [place - length + 1 for place in (8, 16, 24, 32)], "each block with the token after it, whose KV ends it"
    machine.rest()


def test_prompt_logprobs_come_with_a_first_token_that_was_launched_ahead() -> None:
    machine = OverlappedModel(64, 4, chunked_prefill_size=8)
    name = machine.submit(prompt(17), 5, ignore_eos=True, prompt_logprobs=0)  # the last chunk is one token, and scores nothing
    told = machine.told[name]
    while not told.tokens:
        machine.step()
    assert machine.launched == 2 and told.scores == list(range(16))
    machine.run()
    machine.rest()
    machine.check_answers()


@pytest.mark.parametrize("kind", [EngineModel, OverlappedModel])
def test_prompt_logprobs_come_with_a_first_token_that_was_late(kind: type[EngineModel]) -> None:
    machine = kind(64, 4, chunked_prefill_size=8)
    late = stall_at(machine, 1 if kind is OverlappedModel else 3)
    told = machine.told[machine.submit(prompt(17), 5, ignore_eos=True, prompt_logprobs=0)]
    while not told.tokens:
        machine.step()
    assert late() and told.scores == list(range(16))


def test_a_late_request_that_is_preempted_and_readmitted_in_the_next_plan_continues() -> None:
    machine = OverlappedModel(7, 4, policy="lpm", initial_new_token_ratio=0.0, min_new_token_ratio=0.0)
    late = stall_at(machine, 5)
    for length, tokens in ((7, 12), (2, 13)):
        machine.submit(prompt(length), tokens, ignore_eos=True, priority=5)
    while not late(4):
        machine.step()
    machine.submit(prompt(19, 9), 4, ignore_eos=True)
    machine.run(100)
    machine.rest()
    machine.check_answers()
    assert late() and machine.scheduler.load().preemptions


def test_a_request_that_ends_without_a_token_leaves_the_next_plan() -> None:
    """A prompt that is pooled is not launched ahead: its step waits for the one before, and one of that ends as nothing can be chosen."""
    machine = OverlappedModel(64, 4)
    ends, other = (machine.submit(prompt(6, seed), 20, ignore_eos=True) for seed in range(2))
    for _ in range(3):
        machine.step()
    reconcile = machine.ahead.reconcile

    def reconciled(plan: StepPlan, read: Callable[[], StepResult]) -> StepOutputs:
        def nothing_can_be_chosen() -> StepResult:
            result = read()
            return StepResult([[], *result.tokens[1:]], endings={ends: "nothing can be chosen"})

        return reconcile(plan, nothing_can_be_chosen)

    executed: list[str] = []
    execute = machine.execute

    def executes(plan: StepPlan) -> StepResult:
        executed.extend(row.request.id for row in plan.rows)
        return execute(plan)

    machine.ahead.reconcile, machine.execute = reconciled, executes  # type: ignore[method-assign]
    pooled = machine.submit(prompt(7, 3), 1, pooling="last")
    machine.step()
    machine.ahead.reconcile = reconcile  # type: ignore[method-assign]
    assert machine.told[ends].finish == "error"
    assert executed == [other, pooled], "a finished request computes nothing"
    machine.run()
    machine.rest()


def test_a_late_token_is_computed_again_in_a_step_that_is_not_launched_ahead() -> None:
    """The step of a pooled prompt is planned while the tokens before it are unread, and runs when they turned out to be late."""
    machine = OverlappedModel(64, 4)
    for seed in range(2):
        machine.submit(prompt(6, seed), 20, ignore_eos=True)
    for _ in range(3):
        machine.step()
    machine.submit(prompt(7, 3), 1, pooling="last")
    machine.stalls = lambda: True
    machine.step()
    machine.stalls = lambda: False
    machine.run()
    machine.rest()
    machine.check_answers()
    assert machine.stalled == 2


def test_a_prefix_is_shared_with_a_prompt_that_arrives_while_it_is_computed() -> None:
    machine = OverlappedModel(64, 4)
    machine.submit(prompt(33), 4, ignore_eos=True)
    machine.step()
    second = machine.submit([*prompt(33), 3], 4, ignore_eos=True)
    machine.run()
    machine.rest()
    machine.check_answers()
    assert machine.told[second].cached_tokens == 32


@settings(often, max_examples=25)
@given(
    events=events,
    pages=st.integers(8, 64),
    page_size=st.sampled_from([1, 4, 16]),
    host_slots=st.sampled_from([0, 0, 7, 64]),
    chunk=st.sampled_from([-1, 1, 8, 16, 64]),
    policy=st.sampled_from(POLICIES),
    enable_mixed_chunk=st.booleans(),
    itl_target_ms=st.sampled_from([0, 0, 10]),
    noise=st.randoms(use_true_random=False),
    prefill_max_requests=st.sampled_from([0, 0, 1]),
    max_num_seqs=st.sampled_from([1, 3, 64]),
    dedupe_tokens=st.sampled_from([0, 1, 32]),
    initial_new_token_ratio=st.sampled_from([0.0, 0.7]),
    speculative_method=st.sampled_from(["none", "none", "none", "ngram"]),
    stall=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    end=st.sampled_from([0.0, 0.2]),
)
def test_any_arrivals_are_answered_as_by_the_reference(
    events, pages, page_size, host_slots, chunk, policy, itl_target_ms, noise, stall, end, **limits
):
    limits["itl_target_ms"] = itl_target_ms if chunk > 0 else 0
    machine = OverlappedModel(
        pages, page_size, host_slots=host_slots, chunked_prefill_size=chunk, policy=policy, max_model_len=110, **limits
    )
    machine.stalls, machine.ends = lambda: noise.random() < stall, lambda: noise.random() < end
    machine.between = lambda: machine.device.catch_up(noise.choice([0, 0, 1, 2, 100]))
    play(machine, events, lambda: noise.random() < 0.5 and machine.rest(), rounds=40)
    event(f"discarded: {machine.discarded > 0}")
    event(f"stalled: {machine.stalled > 0}")


@settings(often, max_examples=25)
@given(
    events=events,
    pages=st.integers(8, 64),
    page_size=st.sampled_from([1, 4, 16]),
    groups=cache_groups,
    chunk=st.sampled_from([-1, 1, 16]),
    noise=st.randoms(use_true_random=False),
    dedupe_tokens=st.sampled_from([0, 1]),
    stall=st.sampled_from([0.0, 0.1]),
)
def test_any_arrivals_are_answered_as_by_the_reference_in_groups(events, pages, page_size, groups, chunk, noise, stall, **limits):
    """A step in flight reads no page that its successor's plan gave to another request."""
    machine = OverlappedModel(
        pages * groups.count, page_size, groups=groups, chunked_prefill_size=chunk, policy="lpm", max_model_len=110, **limits
    )
    machine.stalls = lambda: noise.random() < stall
    machine.between = lambda: machine.device.catch_up(noise.choice([0, 0, 1, 2, 100]))
    play(machine, events, lambda: noise.random() < 0.5 and machine.rest(), rounds=40)


@settings(often, max_examples=25)
@given(
    events=events,
    pages=st.integers(8, 64),
    page_size=st.sampled_from([1, 4, 16]),
    snapshots=st.sampled_from([1, 3, 100]),
    chunk=st.sampled_from([-1, 1, 16]),
    max_num_seqs=st.sampled_from([1, 3, 64]),
    noise=st.randoms(use_true_random=False),
    stall=st.sampled_from([0.0, 0.1]),
)
def test_any_arrivals_are_answered_as_by_the_reference_with_states(events, pages, page_size, chunk, noise, stall, **limits):
    """A step in flight reads no state that its successor's plan gave to another request. A token that is late ends its request."""
    machine = OverlappedModel(pages, page_size, chunked_prefill_size=chunk, policy="lpm", max_model_len=110, **limits)
    machine.stalls, machine.ends = lambda: noise.random() < stall, lambda: True
    machine.between = lambda: machine.device.catch_up(noise.choice([0, 0, 1, 2, 100]))
    play(machine, events, lambda: noise.random() < 0.5 and machine.rest(), rounds=40)
