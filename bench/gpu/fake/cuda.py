"""The part of `torch.cuda` that the worker uses, for a fake GPU: no time passes, and waits are recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from bench.gpu.fake.gpu import FakeGpu
    from bench.gpu.fake.record import Kernel

PROCESSORS, CAPABILITY = 132, (9, 0)
"""Of an H100 or H200."""


def _event(gpu: "FakeGpu") -> type:
    class Event:
        def __init__(self, **_: Any) -> None:
            self.is_recorded = False

        def record(self, stream: Any = None) -> None:
            self.is_recorded = True

        def synchronize(self) -> None:
            if self.is_recorded:
                gpu.wait("Event.synchronize")

        def wait(self, stream: Any = None) -> None: ...

    return Event


def _stream(gpu: "FakeGpu", event: type) -> type:
    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def wait_stream(self, other: Any) -> None: ...

        def wait_event(self, other: Any) -> None: ...

        def record_event(self, made: Any = None) -> Any:
            made = made or event()
            made.record(self)
            return made

        def synchronize(self) -> None:
            gpu.wait("Stream.synchronize")

    return Stream


def _graph(gpu: "FakeGpu") -> tuple[type, Callable[..., Any]]:
    class CUDAGraph:
        def __init__(self) -> None:
            self.kernels: list[Callable[[], Kernel]] = []

        def replay(self) -> None:
            gpu.record.kernels += [make() for make in self.kernels]
            gpu.record.launches += 1

    @contextmanager
    def capture(graph: CUDAGraph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
        gpu.captured = []
        try:
            yield
            graph.kernels = gpu.captured
        finally:
            gpu.captured = None

    return CUDAGraph, capture


@contextmanager
def patched_cuda(gpu: "FakeGpu", memory: int) -> Iterator[None]:
    """Replace functions of `torch.cuda` in this context. `memory`: bytes of the device, all of them free."""
    event = _event(gpu)
    stream = _stream(gpu, event)
    graph, capture = _graph(gpu)
    current = stream()
    runtime = SimpleNamespace(cudaHostRegister=lambda address, size, flags: _register(gpu, address), cudaHostUnregister=lambda address: 0)
    named: dict[str, Any] = {
        "Event": event,
        "Stream": stream,
        "CUDAGraph": graph,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 0),
        "current_stream": lambda device=None: current,
        "stream": lambda chosen: nullcontext(),
        "synchronize": lambda device=None: gpu.wait("torch.cuda.synchronize"),
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (memory, memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=PROCESSORS, major=9, minor=0, name="fake"),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "cudart": lambda: runtime,
        "is_current_stream_capturing": lambda: gpu.captured is not None,
        "_lazy_init": lambda: None,
    }
    with patch.multiple(torch.cuda, **named):
        yield


def _register(gpu: "FakeGpu", address: int) -> int:
    gpu.pinned[address] = torch.empty(0)
    return 0
