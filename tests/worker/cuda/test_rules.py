"""The model's own rules: what CUDA and torch allow, what they refuse, and which accesses are ordered."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.worker.cuda.tensors import CUDA, DeviceMode
from tests.worker.cuda.torch_cuda import modelled_device


@pytest.fixture
def mode() -> Iterator[DeviceMode]:
    with modelled_device() as made:
        yield made


def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch


def record(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), stream=stream()):
        run()
    return graph


def test_a_capture_runs_nothing_and_a_replay_everything(mode: DeviceMode) -> None:
    values = torch.zeros(3, device=CUDA)
    graph = record(lambda: values.add_(1).mul_(2))
    assert values.tolist() == [0, 0, 0]
    graph.replay()
    graph.replay()
    assert values.tolist() == [6, 6, 6]
    assert mode.machine.faults == []


def test_memory_of_a_capture_is_garbage_until_a_replay(mode: DeviceMode) -> None:
    values, made = torch.ones(3, device=CUDA), list[torch.Tensor]()
    graph = record(lambda: made.append(values + 1))
    assert made[0].tolist() != [2, 2, 2]
    graph.replay()
    assert made[0].tolist() == [2, 2, 2]


REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "synchronize": lambda values, _: torch.cuda.synchronize(),
    "item": lambda values, _: values.sum().item(),
    "copy to the host": lambda values, _: values.cpu(),
    "copy of pageable memory": lambda values, host: values.copy_(host),
    "pinned allocation": lambda values, host: host.pin_memory(),
    "index on the host": lambda values, host: values[torch.tensor([1])],
    "nonzero": lambda values, _: values.nonzero(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_capture_refuses_what_waits_or_is_not_recorded(name: str, mode: DeviceMode) -> None:
    values, host = torch.ones(3, device=CUDA), torch.ones(3)
    with pytest.raises(RuntimeError, match="previous error during capture") as caught:
        record(lambda: REFUSED[name](values, host))
    assert "not permitted when stream is capturing" in str(caught.value.__context__)
    REFUSED[name](values, host)


def test_the_default_stream_is_not_captured(mode: DeviceMode) -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin(torch.cuda.graph_pool_handle())


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_used_on_another_stream_needs_record_stream(recorded: bool, mode: DeviceMode) -> None:
    side, values = stream(), torch.ones(3, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.sum()
    if recorded:
        values.record_stream(side)
    del values
    torch.zeros(3, device=CUDA)
    assert any("reuse of memory" in fault for fault in mode.machine.faults) is not recorded


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_on_another_stream_needs_an_event(waits: bool, mode: DeviceMode) -> None:
    side, values = stream(), torch.ones(3, device=CUDA)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.sum()
    assert bool(mode.machine.faults) is not waits


def test_parts_of_one_tensor_are_apart(mode: DeviceMode) -> None:
    side, values = stream(), torch.ones(4, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    values[:2].zero_()
    with torch.cuda.stream(side):
        values[2:].sum()
    assert mode.machine.faults == []
    with torch.cuda.stream(side):
        values.sum()
    assert mode.machine.faults
