"""The parts of `torch.cuda` that the worker calls, on a `Machine`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any, Protocol
from unittest.mock import patch

import torch
from tests.worker.cuda.clocks import Clock, join
from tests.worker.cuda.machine import Block, Capture, Machine, Pool, StreamState
from tests.worker.cuda.tensors import CUDA, DeviceMode


class Mode(Protocol):
    """What runs operations on tensors of the device, with the host memory that the device may copy, by first address."""

    host_blocks: dict[int, tuple[Block, int]]

    def register(self, address: int, size: int, kind: str = "registered") -> Block: ...


def parts_of(machine: Machine, mode: Mode, processors: int = 1) -> dict[str, Any]:
    """Return replacements by name, relative to `torch`."""

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.clock: Clock = {}
            self.capture: Capture | None = None

        def record(self, stream: "Stream | None" = None) -> None:
            machine.begin("event record")
            state = machine.current if stream is None else stream.state
            self.clock, self.capture = join(state.clock, machine.host), state.capture

        def wait(self, stream: "Stream | None" = None) -> None:
            machine.begin("event wait")
            if not self.clock:
                return  # never recorded
            state = machine.current if stream is None else stream.state
            machine.join_capture(state, self.capture, "event wait")
            state.clock = join(state.clock, self.clock)

        def synchronize(self) -> None:
            if self.capture is not None and self.capture in machine.captures:
                machine.refuse("synchronize on an event of the capture")
            machine.wait(self.clock, "event synchronize")

        def query(self) -> bool:
            machine.begin("event query")
            machine.refuse("event query")
            return True

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, state: StreamState | None = None) -> None:
            self.state = state or machine.new_stream()
            self.device, self.stream_id = CUDA, self.state.number

        def wait_event(self, event: Event) -> None:
            event.wait(self)

        def wait_stream(self, other: "Stream") -> None:
            self.wait_event(other.record_event())

        def record_event(self, event: Event | None = None) -> Event:
            recorded = event or Event()
            recorded.record(self)
            return recorded

        def synchronize(self) -> None:
            machine.wait(self.state.clock, "stream synchronize")

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.state is self.state

        def __hash__(self) -> int:
            return self.state.number

    class StreamContext:
        def __init__(self, stream: Stream) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            self._before, machine.current = machine.current, self._stream.state

        def __exit__(self, *error: object) -> None:
            machine.current = self._before

    class CUDAGraph:
        def __init__(self) -> None:
            self._capture: Capture | None = None
            self._done = False

        def capture_begin(self, pool: tuple[int, int], capture_error_mode: str = "global") -> None:
            self._capture = machine.begin_capture(machine.pools[pool[1]], capture_error_mode)

        def capture_end(self) -> None:
            assert self._capture is not None
            machine.end_capture(self._capture)
            self._done = True

        def __del__(self) -> None:
            if self._capture is not None and self._done:
                machine.release_pool(self._capture.pool)

        def replay(self) -> None:
            assert self._capture is not None and self._done, "replay of a graph without a valid capture"
            machine.replay(self._capture)

    class Graph:
        """As `torch.cuda.graph` (2.15): if `capture_begin` raises, its stream stays current."""

        def __init__(self, graph: CUDAGraph, pool: tuple[int, int], stream: Stream, capture_error_mode: str = "global") -> None:
            self._mode = capture_error_mode
            self._graph, self._pool, self._context = graph, pool, torch.cuda.stream(stream)  # type: ignore[arg-type]  # the one above

        def __enter__(self) -> None:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._context.__enter__()  # type: ignore[no-untyped-call]  # the one above
            self._graph.capture_begin(self._pool, self._mode)

        def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
            try:
                self._graph.capture_end()
            except Exception:
                if not machine.is_old:
                    self._context.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
                raise
            self._context.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            mode.register(address, size)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            block, _ = mode.host_blocks.pop(address)
            machine.find("cudaHostUnregister", block.history.unfinished(machine.host))
            return 0

    def pool_handle() -> tuple[int, int]:
        machine.begin("pool handle")
        machine.pools.append(Pool(len(machine.pools)))
        return 0, len(machine.pools) - 1

    def begin_to_pool(device: int, pool: tuple[int, int]) -> None:
        machine.hinted = machine.pools[pool[1]]

    return {
        "cuda.Event": Event,
        "cuda.Stream": Stream,
        "cuda.stream": StreamContext,
        "cuda.current_stream": lambda device=None: Stream(state=machine.current),
        "cuda.set_stream": lambda stream: setattr(machine, "current", stream.state),
        "cuda.synchronize": lambda device=None: machine.synchronize(),
        "cuda.empty_cache": machine.empty_cache,
        "cuda.CUDAGraph": CUDAGraph,
        "cuda.graph": Graph,
        "cuda.graph_pool_handle": pool_handle,
        "cuda.cudart": Runtime,
        "cuda.get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=processors, major=9, minor=0, name="fake"),
        "cuda.get_device_capability": lambda device=None: (9, 0),
        "cuda.current_device": lambda: 0,
        "cuda.device_count": lambda: 1,
        "cuda.is_current_stream_capturing": lambda: machine.current.capture is not None,
        "cuda._lazy_init": lambda: None,
        "_C._cuda_endAllocateToPool": lambda device, pool: machine.end_recording(machine.pools[pool[1]]),
        "_C._cuda_releasePool": lambda device, pool: machine.release_pool(machine.pools[pool[1]]),
        "_C._cuda_beginAllocateCurrentStreamToPool": begin_to_pool,
    }


@contextmanager
def modelled_device(is_old: bool = False) -> Iterator[DeviceMode]:
    """Run this context's work for cuda:0 on a new machine. `is_old`: as in `Machine`."""
    machine = Machine(is_old)
    mode = DeviceMode(machine)
    with replaced(parts_of(machine, mode)), mode:
        yield mode


@contextmanager
def replaced(parts: dict[str, Any]) -> Iterator[None]:
    """Replace `parts` of torch in this context, where `device="cuda"` may be named without a driver."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    torch._C._ensureCUDADeviceGuardSet()
    try:
        with ExitStack() as stack:
            for name, part in parts.items():
                stack.enter_context(patch(f"torch.{name}", part, create=True))
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
