"""A failure at any operation of a capture leaves a worker that serves, without graphs."""

from collections.abc import Iterator

import pytest
import torch
from tests.worker.cuda.engine import Engine, capture, device_engine
from tests.worker.cuda.machine import Failure
from tests.worker.cuda.tensors import CUDA

from fairlead_worker.lora.slots import AdapterSlots

PROMPT = 2
KINDS = [(False, False), (True, False), (False, True)]
"""An error of the host, an illegal call that breaks the capture, and no memory."""
DRIVER = ("capture_begin", "cudaStreamBeginCapture", "capture_end", "event wait", "event record", "synchronize", "empty_cache")
"""Operations that fail in every way. The others, mostly the model's own, fail in one of them, and only on an old torch, which forgives
less."""


def serve(engine: Engine, expected: list[list[int]]) -> None:
    engine.submit(PROMPT)
    engine.finish()
    assert engine.answers()[str(len(engine.prompts) - 1)] == expected[PROMPT]


def failures(operations: list[str], is_old: bool) -> Iterator[Failure]:
    for at, name in enumerate(operations):
        kinds = KINDS if name in DRIVER else [KINDS[at % len(KINDS)]] if is_old else []
        for kind in kinds:
            yield Failure(at, *kind)


@pytest.mark.parametrize("is_old", [False, True], ids=["new torch", "old torch"])
def test_a_failure_at_any_operation_of_a_capture_falls_back(is_old: bool, expected: list[list[int]]) -> None:
    """After it, eager steps give the same tokens, memory can be measured, and the next capture is as good as the first."""
    with device_engine(host_tier=False, is_old=is_old) as (engine, mode):
        machine, runner = mode.machine, engine.runner
        every = list(capture(runner, machine))
        assert {*DRIVER, "attention", "append"} <= set(every)
        serve(engine, expected)
        assert machine.replays > 0
        for failure in failures(every, is_old):
            capture(runner, machine, failure)
            where = f"{failure} ({every[failure.at]})"
            assert runner.graphs is not None and not runner.graphs.is_recorded, where
            assert machine.current is machine.default and not machine.captures and not machine.recording, where
            assert not is_old or not any(pool.uses for pool in machine.pools), f"{where}: the memory of the pool is lost"
            machine.replays = 0
            machine.empty_cache()
            serve(engine, expected)
            assert machine.replays == 0 and not machine.faults, (where, machine.faults)
        capture(runner, machine)
        serve(engine, expected)
        assert machine.replays > 0 and not machine.faults


@pytest.mark.parametrize("is_old", [False, True], ids=["new torch", "old torch"])
def test_a_failed_capture_with_adapters_leaves_the_graphs_without(is_old: bool, expected: list[list[int]]) -> None:
    """The graphs with adapters are recorded first: a failure there must not spoil the pool of the others."""
    with device_engine(graphs=False, host_tier=False, is_old=is_old) as (engine, mode):
        machine, runner = mode.machine, engine.runner
        slots = AdapterSlots({}, 2, 4, torch.float16, CUDA)
        at = capture(runner, machine, slots=slots).index("capture_end")
        for kind in KINDS:
            capture(runner, machine, Failure(at, *kind), slots)
            assert runner.graphs is not None and runner.graphs.is_recorded
            machine.replays = 0
            serve(engine, expected)
            assert machine.replays > 0 and not machine.faults
