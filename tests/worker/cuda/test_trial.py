"""The start-up trial on the modelled device: it is in order, and a failure at any of its operations leaves a worker that serves."""

from collections.abc import Iterator

import pytest
from tests.worker.cuda import planted
from tests.worker.cuda.engine import CONTEXT, PAGES, Engine, device_engine
from tests.worker.cuda.machine import Failure, Machine
from tests.worker.cuda.planted import Patch, Plant

from fairlead_worker.execution import trial, trial_requests
from fairlead_worker.execution.trial import Modes, Outcome, try_modes

BOTH = Modes(graphs=True, overlap=True)
PROMPT = 2
FAILURES = 8
"""Operations that fail, spread over the trial: it has hundreds, and its steps repeat the same ones."""


def run(engine: Engine, machine: Machine, failure: Failure | None = None) -> tuple[Outcome, list[str]]:
    with machine.count_operations(failure) as operations:
        outcome = try_modes(engine.runner, engine.scheduler.config, CONTEXT, True)
    return outcome, operations


def serve(engine: Engine, expected: list[list[int]]) -> None:
    engine.submit(PROMPT)
    engine.finish()
    assert engine.answers()[str(len(engine.prompts) - 1)] == expected[PROMPT]


@pytest.fixture
def few(monkeypatch: Patch) -> None:
    """A shorter trial: a failure is planted into it many times."""
    monkeypatch.setattr(trial, "MAX_SECONDS", float("inf"))
    monkeypatch.setattr(trial_requests, "NEW_TOKENS", 3)
    monkeypatch.setattr(trial_requests, "CHUNK", 4)


def test_the_trial_is_in_order_and_leaves_no_page_behind(few: None, expected: list[list[int]]) -> None:
    with device_engine() as (engine, mode):
        outcome, _ = run(engine, mode.machine)
        assert outcome == Outcome(BOTH) and mode.machine.replays > 5
        assert mode.machine.faults == []
        assert engine.cache.pool.free == PAGES
        serve(engine, expected)
        assert mode.machine.faults == []


def failures(count: int) -> Iterator[Failure]:
    for turn in range(FAILURES):
        yield Failure(turn * (count - 1) // (FAILURES - 1), False, out_of_memory=turn % 2 == 1)


def test_a_failure_at_any_operation_of_the_trial_falls_back_and_serves(few: None, expected: list[list[int]]) -> None:
    with device_engine(host_tier=False) as (engine, mode):
        machine, graphs = mode.machine, engine.runner.graphs
        outcome, operations = run(engine, machine)
        assert outcome == Outcome(BOTH)
        for failure in failures(len(operations)):
            engine.runner.graphs = graphs
            outcome, _ = run(engine, machine, failure)
            where = f"{failure} ({operations[failure.at]}): {outcome}"
            assert outcome.modes != BOTH and "planted" in outcome.failure, where
            assert (engine.runner.graphs is graphs) == outcome.modes.graphs, where
            machine.replays = 0
            serve(Engine(engine.runner), expected)  # with an empty cache: the trial has written to its pages
            assert bool(machine.replays) == outcome.modes.graphs and not machine.faults, (where, machine.faults)


@pytest.mark.parametrize("plant", [planted.tokens_are_read_early, planted.replay_before_its_inputs], ids=lambda plant: plant.__name__)
def test_an_ordering_fault_of_a_step_shows_in_the_trial(plant: Plant, monkeypatch: Patch) -> None:
    """So the trial runs what a service runs."""
    plant(monkeypatch)
    with device_engine(host_tier=False) as (engine, mode):
        run(engine, mode.machine)
        assert mode.machine.faults
