"""Speculation in the scheduler: what it may take, when it gives up, and that a request's end is the same one."""

import random
from array import array

import pytest
from tests.worker.scheduler.engine_model import VOCABULARY, EngineModel

from fairlead_worker.scheduler.speculation import Drafting

PROMPT = [3, 1, 4, 1, 5]


def counts(machine: EngineModel) -> tuple[int, int, int]:
    drafts = machine.scheduler.load().drafts
    assert drafts is not None
    return drafts.rounds, drafts.tokens, drafts.accepted


def steps(machine: EngineModel) -> int:
    done = 0
    while not machine.scheduler.idle:
        machine.step()
        machine.check()
        done += 1
    machine.check_answers()
    return done


def test_right_drafts_save_steps() -> None:
    machine = EngineModel(64, 4, speculative_method="draft", speculative_num_tokens=4)
    machine.submit(PROMPT, 41, ignore_eos=True)
    assert steps(machine) == 1 + 8
    assert counts(machine) == (8, 32, 32)
    assert machine.scheduler.load().drafts.accepted_at == (8, 8, 8, 8)
    assert machine.scheduler.load().output_tokens == 41


def test_ngram_lookup_drafts_text_that_repeats_itself() -> None:
    machine = EngineModel(64, 4, speculative_method="ngram", speculative_ngram_min=1)
    told: list[int] = []
    machine._verified = lambda row, values: told.append(len(row.draft)) or [*row.draft, 5]  # type: ignore[method-assign]  # says what was guessed
    machine.submit([5, 5, 5, 5], 30, ignore_eos=True)
    while not machine.scheduler.idle:
        machine.scheduler.advance(plan := machine.scheduler.plan(), machine._forward(plan))
    assert told[1:] == [5, 5, 5, 5, 4]  # the first token, then six at a time, and no guess beyond the 30th


def test_wrong_drafts_stop_and_cost_little() -> None:
    machine = EngineModel(200, 4, speculative_method="draft")
    machine.guess = lambda right: (right + 1) % VOCABULARY
    machine.submit(PROMPT, 500, ignore_eos=True)
    assert steps(machine) == 500
    _, tokens, accepted = counts(machine)
    assert accepted == 0 and tokens < 60


def test_drafting_resumes_when_drafts_are_accepted_again() -> None:
    drafting = Drafting(None)
    for _ in range(100):
        if count := drafting.choose_length(0.05, 5):
            drafting.observe(count, 0)
    assert drafting.pause == 64
    waited = 0
    while not drafting.choose_length(0.05, 5):
        waited += 1
    assert waited <= 64
    drafting.observe(1, 1)
    for _ in range(8):
        count = drafting.choose_length(0.05, 5)
        drafting.observe(count, count)
    assert drafting.choose_length(0.05, 5) == 5


def test_a_large_batch_does_not_speculate() -> None:
    def drafted(requests: int, break_even: int) -> int:
        machine = EngineModel(64 * requests, 4, chunked_prefill_size=-1, speculative_method="draft", speculative_break_even=break_even)
        for seed in range(requests):
            machine.submit([seed, *PROMPT], 30, ignore_eos=True)
        machine.step()
        return machine.step().drafted

    assert drafted(1, 64) == 5
    assert 0 < drafted(48, 64) < 2 * 48
    assert drafted(200, 64) == 0
    assert drafted(200, 10_000) == 1000


def test_a_slow_draft_model_is_used_less_and_tried_again() -> None:
    machine = EngineModel(300, 4, speculative_method="draft")
    machine.submit(PROMPT, 1000, ignore_eos=True)
    forward, drafted = machine._forward, []

    def slow(plan):
        result = forward(plan)
        result.draft_forwards = max((len(row.draft) for row in result.executed.rows), default=0)
        result.seconds, result.draft_seconds = 1.0 + 2.0 * result.draft_forwards, 2.0 * result.draft_forwards
        drafted.append(plan.drafted)
        return result

    machine._forward = slow  # type: ignore[method-assign]  # a draft model twice as slow as the model
    steps(machine)
    assert sum(drafted[:5]) > 10
    assert 0 < sum(drafted[100:]) < 0.2 * len(drafted[100:])


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_no_request_loses_pages_for_a_draft(method: str) -> None:
    """Step for step as many retractions and evictions as the pages of known tokens cause, and every answer the reference's."""

    def run(method: str) -> tuple[int, list[list[int]]]:
        machine = EngineModel(24, 4, speculative_method=method, initial_new_token_ratio=0.0, min_new_token_ratio=0.0)
        machine.guess = lambda right: VOCABULARY  # never right: the requests grow as they do without
        for seed in range(6):
            machine.submit([seed, *PROMPT], 30, ignore_eos=True)
        machine.run()
        machine.check_answers()
        return machine.scheduler.load().preemptions, [sorted(name for name, _, _ in rows) for rows in machine.plans]

    plain, guessed = run("none"), run(method)
    assert plain[0] > 0
    assert guessed == plain


def test_drafts_use_only_free_pages() -> None:
    machine = EngineModel(4, 4, speculative_method="draft", speculative_num_tokens=20)
    machine.submit([1, 2, 3], 9, ignore_eos=True)
    machine.step()
    assert machine.step().drafted == 7  # the twelfth token is never computed, so neither is a guess at it
    machine = EngineModel(4, 4, speculative_method="draft", speculative_num_tokens=20, initial_new_token_ratio=0.0, min_new_token_ratio=0.0)
    for seed in range(2):
        machine.submit([seed, 2, 3, 4, 5], 7, ignore_eos=True)
    machine.step()
    assert machine.step().drafted == 2 + 2  # two pages each: three known tokens short of full, no page left


@pytest.mark.parametrize("stop", [(), (3, 9)])
def test_an_end_inside_an_accepted_run_is_the_end(stop: tuple[int, ...]) -> None:
    for seed in range(20):
        for tokens in (1, 2, 7):
            machine = EngineModel(64, 4, speculative_method="draft", speculative_num_tokens=20)
            machine.submit([seed, *PROMPT], 30, stop_token_ids=stop, min_tokens=tokens)
            machine.run()
            machine.check_answers()


def test_only_accepted_tokens_are_cached() -> None:
    """Half of the guesses are wrong; a second request over the first one's text reads its pages, which are checked token by token."""
    draw = random.Random(1)
    machine = EngineModel(200, 4, speculative_method="draft", speculative_num_tokens=9)
    machine.guess = lambda right: right if draw.random() < 0.6 else draw.randrange(VOCABULARY)
    first = machine.submit(PROMPT, 50, ignore_eos=True)
    machine.run()
    told = machine.told[first]
    machine.submit([*PROMPT, *told.tokens], 10, ignore_eos=True)
    machine.run()
    machine.check_answers()
    assert machine.scheduler.load().cached_tokens == (len(PROMPT) + 50 - 1) // 4 * 4
    assert array("I", told.submit.tokens).tolist() == PROMPT
