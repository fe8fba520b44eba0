"""A rank of a sharded model on the modelled device: sums in graphs, and what happens if this rank or another cannot record them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from tests.worker.cuda.engine import PROMPTS, Engine, capture, device_engine, expected_answers
from tests.worker.cuda.machine import Failure
from tests.worker.cuda.planted import Patch, edit
from tests.worker.cuda.ranks import DoublingGroup, ModelledGroup
from tests.worker.cuda.tensors import CUDA, DeviceMode
from tests.worker.cuda.test_capture import DRIVER, KINDS, PROMPT, serve

from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes
from fairlead_worker.execution.cuda_graphs.recorder import CudaRecorder
from fairlead_worker.lora.slots import AdapterSlots


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Tokens of each prompt, alone on the CPU."""
    return expected_answers(group=DoublingGroup())


@contextmanager
def rank_engine() -> Iterator[tuple[Engine, DeviceMode, ModelledGroup]]:
    """Yield an engine of rank 0 that has recorded its graphs."""
    groups: list[ModelledGroup] = []

    def make(mode: DeviceMode) -> ModelledGroup:
        groups.append(ModelledGroup(mode))
        return groups[0]

    with device_engine(host_tier=False, group=make) as (engine, mode):
        yield engine, mode, groups[0]


def run(engine: Engine, mode: DeviceMode, group: ModelledGroup, failure: Failure | None = None) -> tuple[GraphedDecodes, list[str]]:
    """Record again. Return the graphs and the names of the operations."""
    group.agreements = 0
    operations = capture(engine.runner, mode.machine, failure, group=group)
    assert engine.runner.graphs is not None
    return engine.runner.graphs, list(operations)


def test_a_batch_uses_graphs_with_sums_without_a_fault(expected: list[list[int]]) -> None:
    with rank_engine() as (engine, mode, group):
        assert engine.runner.graphs is not None and engine.runner.graphs.is_recorded
        assert group.most_eager == 0, "nothing is summed before all ranks have recorded"
        for _ in range(2):
            for prompt in range(len(PROMPTS)):
                engine.submit(prompt)
            engine.finish()
        assert engine.answers() == {name: expected[prompt] for name, prompt in engine.prompts.items()}
        assert mode.machine.replays and mode.machine.faults == []


def test_a_failure_at_any_operation_of_a_capture_falls_back_on_all_ranks(expected: list[list[int]]) -> None:
    with rank_engine() as (engine, mode, group):
        machine, every = mode.machine, run(engine, mode, group)[1]
        assert {*DRIVER, "attention", "append", "all_reduce"} <= set(every)
        for at, name in enumerate(every):
            if name not in DRIVER and at % 5:
                continue
            before = group.communicator
            graphs, _ = run(engine, mode, group, Failure(at, *KINDS[at % len(KINDS)]))
            assert not graphs.is_recorded and group.communicator == before + 1, (at, name)
            assert machine.current is machine.default and not machine.captures and not machine.recording, (at, name)
            machine.replays = 0
            serve(engine, expected)
            assert machine.replays == 0 and not machine.faults, (at, name, machine.faults)
        run(engine, mode, group)
        serve(engine, expected)
        assert machine.replays > 0 and not machine.faults


def test_a_failure_of_another_rank_in_any_agreement_falls_back(expected: list[list[int]]) -> None:
    with rank_engine() as (engine, mode, group):
        machine = mode.machine
        run(engine, mode, group)
        for at in range(1, group.agreements + 1):
            group.fails_at = at
            graphs, _ = run(engine, mode, group)
            assert graphs.failure == "rank 1 of 2: planted" and not graphs.is_recorded
            machine.replays = 0
            serve(engine, expected)
            assert machine.replays == 0 and not machine.faults, (at, machine.faults)


def serve_with_adapters(engine: Engine, mode: DeviceMode, group: ModelledGroup) -> GraphedDecodes:
    """Record with adapters, which another rank cannot for the second size, and run requests."""
    group.agreements, group.fails_at = 0, 5
    capture(engine.runner, mode.machine, slots=AdapterSlots({}, 2, 4, torch.float16, CUDA), group=group)
    assert engine.runner.graphs is not None
    for prompt in (PROMPT, 0):
        engine.submit(prompt)
    engine.finish()
    return engine.runner.graphs


def test_graphs_before_a_replaced_communicator_are_recorded_again(expected: list[list[int]]) -> None:
    with rank_engine() as (engine, mode, group):
        graphs = serve_with_adapters(engine, mode, group)
        assert graphs.is_recorded and graphs.adapter_failure == "rank 1 of 2: planted" and not graphs.failure
        assert engine.answers() == {"0": expected[PROMPT], "1": expected[0]}
        assert mode.machine.replays > 0 and mode.machine.faults == []


# Planted faults


def test_sums_in_the_run_before_a_capture(monkeypatch: Patch) -> None:
    """If another rank has failed there, the device waits for it: ScaleLLM#131, pegainfer#498, sgl-project/sglang#11275."""
    monkeypatch.setattr(ModelledGroup, "rehearse", lambda self: nullcontext())
    with rank_engine() as (_, _, group):
        assert group.most_eager > 0


def test_a_capture_that_other_threads_can_break(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    """`capture_error_mode="global"` beside the threads of NCCL: vllm-project/vllm#46253."""
    mode = '"thread_local" if group is not None or torch.distributed.is_initialized() else "global"'
    edit(monkeypatch, CudaRecorder, "__init__", (mode, '"global"'))
    with rank_engine() as (engine, _, _):
        assert engine.runner.graphs is not None and not engine.runner.graphs.is_recorded
        assert "an event query of the watchdog, on another thread" in caplog.text


def test_graphs_of_a_communicator_that_was_replaced(monkeypatch: Patch) -> None:
    """A failed capture breaks the communicator (pie-project/pie#499), and graphs of earlier sizes contain it."""
    edit(monkeypatch, GraphedDecodes, "capture", ("self._clear()  # they", "continue  # they"))
    with rank_engine() as (engine, mode, group):
        serve_with_adapters(engine, mode, group)
        assert "a sum of a communicator that was replaced" in mode.machine.faults
