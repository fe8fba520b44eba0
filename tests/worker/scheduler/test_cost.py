"""The cost of a step in the scheduler, in calls and not in time, so that it is equal on every machine."""

import gc
import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest
from tests.worker.scheduler.engine_model import EngineModel
from tests.worker.scheduler.overlapped import OverlappedModel

from fairlead_common.scheduling_policy import POLICIES
from fairlead_worker.scheduler.plan import StepResult


def calls_of(work: Callable[[], object], builtins: bool = False) -> int:
    """Return how many Python functions the work calls, and with `builtins` how many built-in ones too."""
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" or (builtins and event == "c_call")

    gc.disable()  # callbacks of the collector would be counted
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_of_a_step(decodes: int) -> int:
    """Of plan() and advance() in a step in which `decodes` requests get a token each and no page fills."""
    machine = EngineModel(decodes * 4, 16)
    for seed in range(decodes):
        machine.submit([seed, seed, seed], 20, ignore_eos=True)
    machine.step()
    machine.step()
    plan = machine.scheduler.plan()
    result = machine._forward(plan)

    def step() -> None:
        assert len(machine.scheduler.advance(plan, result).decoded) == decodes
        assert machine.scheduler.plan().decodes == decodes

    return calls_of(step)


def calls_of_a_step_ahead(decodes: int) -> int:
    """The same where the next step is planned before this one is read."""
    machine = OverlappedModel(decodes * 4, 16)
    for seed in range(decodes):
        machine.submit([seed, seed, seed], 20, ignore_eos=True)
    for _ in range(3):
        machine.step()
    machine.rest()
    scheduler = machine.ahead
    plan = scheduler.plan()

    def step() -> None:
        scheduler.advance_unread(plan, scheduler.rows_to_sample(plan))
        assert scheduler.plan().decodes == decodes
        assert len(scheduler.reconcile(plan, lambda: StepResult([[7]] * decodes)).decoded) == decodes

    return calls_of(step)


def test_the_calls_of_a_step_do_not_depend_on_the_number_of_plain_decodes() -> None:
    assert calls_of_a_step(60) == calls_of_a_step(3) < 30
    assert calls_of_a_step_ahead(60) == calls_of_a_step_ahead(3) < 40


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_flat(policy: str) -> None:
    """Objects that the collector knows, after each of three times 300 requests of new prompts, roots and ids."""
    machine = EngineModel(256, 4, policy=policy, max_num_seqs=64)
    draw, seen = random.Random(1), []
    for _ in range(3):
        for _ in range(300):
            machine.submit([draw.randrange(1000) for _ in range(9)], 2, root=draw.randrange(1 << 30))
            if len(machine.scheduler.waiting) > 100:
                machine.step()
        while not machine.scheduler.idle:
            machine.step()
        machine.told.clear()
        machine.plans.clear()
        machine.parents.clear()
        machine.scheduler.cache.drain_events()
        gc.collect()
        seen.append(len(gc.get_objects()))
    assert seen[2] <= seen[1] + 50, seen
