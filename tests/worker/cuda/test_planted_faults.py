"""Planted faults: each is found by the model, and by the rule that it breaks."""

import pytest
from tests.worker.cuda import planted
from tests.worker.cuda.engine import capture, device_engine
from tests.worker.cuda.machine import Failure
from tests.worker.cuda.planted import Patch, Plant

UNORDERED: dict[Plant, str] = {
    planted.load_is_not_awaited: "aten.index_copy_.default is not ordered after a copy to the device",
    planted.save_starts_early: "a copy to the host is not ordered after aten.copy_.default",
    planted.event_on_the_wrong_stream: "aten.copy_.default is not ordered after a copy to the host",
    planted.load_into_temporary_memory: "reuse of memory freed on stream",
    planted.host_tier_is_freed_early: "cudaHostUnregister is not ordered after a copy to the",
    planted.plan_is_staged_early: "aten.fill_.Scalar on the host is not ordered after a copy to the device",
    planted.tokens_are_read_early: "on the host is not ordered after a copy to the host",
    planted.replay_before_its_inputs: "a replay is not ordered after",
    planted.result_is_not_awaited: "is not ordered after a replay",
    planted.graph_reads_freed_memory: "a replay uses memory that was freed",
    planted.eager_work_in_the_pool: "blocks that eager work took from the pool",
}
"""Faults of a service without any error, and the access that shows each."""
REFUSED: dict[Plant, str] = {
    planted.event_of_another_stream_in_a_capture: "dependency created on uncaptured work",
    planted.unjoined_stream_in_a_capture: "unjoined work",
}
"""What CUDA refuses in a capture, so that steps run without graphs."""


def serve() -> tuple[list[str], int]:
    """Serve requests that use graphs, save and load. Return the faults, and the copies of pageable memory."""
    with device_engine() as (engine, mode):
        assert engine.runner.graphs is not None and engine.runner.graphs.is_recorded
        for prompts in ([5], [3, 4], [1, 2], [5], [3, 0], [5], [4, 1]):
            for prompt in prompts:
                engine.submit(prompt)
            engine.finish()
        assert engine.runner.host is not None
        load = engine.scheduler.load().host
        assert load is not None and load.saved > 5 and load.loaded > 5 and mode.machine.replays > 5
        engine.runner.host = None
        return mode.machine.faults, mode.pageable


def test_without_a_planted_fault_there_is_none() -> None:
    assert serve() == ([], 0)


@pytest.mark.parametrize("plant", UNORDERED, ids=lambda plant: plant.__name__)
def test_an_access_that_depends_on_the_speed_of_streams_is_found(plant: Plant, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    faults, _ = serve()
    assert any(UNORDERED[plant] in fault for fault in faults), set(faults)


@pytest.mark.parametrize("plant", REFUSED, ids=lambda plant: plant.__name__)
def test_what_cuda_refuses_in_a_capture_is_refused(
    plant: Plant, monkeypatch: Patch, caplog: pytest.LogCaptureFixture, expected: list[list[int]]
) -> None:
    plant(monkeypatch)
    with device_engine(host_tier=False) as (engine, _):
        assert engine.runner.graphs is not None and not engine.runner.graphs.is_recorded
        assert REFUSED[plant] in caplog.text
        engine.submit(1)
        engine.finish()
        assert engine.answers() == {"0": expected[1]}


def test_copies_of_pageable_memory_are_counted(monkeypatch: Patch) -> None:
    planted.pageable_copies(monkeypatch)
    _, pageable = serve()
    assert pageable > 20


@pytest.mark.parametrize(
    ("plant", "operation", "invalidates"),
    [
        (planted.pool_of_a_failed_capture, "capture_end", True),
        (planted.stream_of_a_failed_capture, "capture_begin", False),
        (planted.work_of_a_failed_warm_up, "attention", False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_failed_capture_leaves_behind_is_found(
    plant: Plant, operation: str, invalidates: bool, monkeypatch: Patch, expected: list[list[int]]
) -> None:
    plant(monkeypatch)
    with device_engine(graphs=False, host_tier=False, is_old=True) as (engine, mode):
        machine, runner = mode.machine, engine.runner
        at = capture(runner, machine).index(operation)
        assert machine.faults == []
        capture(runner, machine, Failure(at, invalidates))
        engine.submit(1)
        engine.finish()
        left: dict[Plant, bool] = {
            planted.pool_of_a_failed_capture: bool(machine.recording),
            planted.stream_of_a_failed_capture: machine.current is not machine.default,
            planted.work_of_a_failed_warm_up: any("is not ordered after append" in fault for fault in machine.faults),
        }
        assert left[plant], (machine.recording, machine.current, machine.faults)
