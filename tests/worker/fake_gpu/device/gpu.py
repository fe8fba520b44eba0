"""A fake GPU: tensors of a CUDA device are torch's fake tensors (shape, dtype and device, no content), tensors of the host are real.

So the host's part of a step is computed as on a GPU, from real page tables and requests, and every branch for `cuda` runs. What the host
reads from the device is zeros. As CUDA does, the fake GPU refuses operations that mix devices, and it records where the host would wait:
reads of values, results whose shape depends on values, and copies of pageable memory.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from tests.worker.cuda.clocks import Clock
from tests.worker.cuda.machine import Block, Capture, Machine
from tests.worker.cuda.torch_cuda import parts_of, replaced
from tests.worker.fake_gpu.device.costs import bytes_of, dtype_of, flops_of, size_of, tensors
from tests.worker.fake_gpu.device.record import Kernel, Record, Wait
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
PROCESSORS = 132
"""Of an H100 or H200."""
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
"""Operations whose result the host gets. Here numbers are zero, as differences of equal tensors are, and conditions hold."""
SHAPED = {
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.unique_dim_consecutive, aten.bincount,
}  # fmt: skip
"""Operations whose result has a shape that depends on values, so that the host waits for it."""
FREE = {
    aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.lift_fresh, aten.detach, aten.alias,
    aten.detach_, aten.set_, aten._unsafe_view, aten.resize_,
}  # fmt: skip
"""Operations without a kernel, besides views."""
HIDDEN = ("/torch/", "/fake_gpu/device/", "/worker/cuda/", "/unittest/", "/contextlib.py")
"""Files that are never the site of a wait."""


class MixedDevices(RuntimeError):
    """An operation has tensors of the host and of the device."""


class Counting(Machine):
    """The device's streams, events and graphs, as in the model of their order. Launches and waits are counted."""

    def __init__(self, record: Callable[[], Record]) -> None:
        super().__init__()
        self._record_of = record

    def wait(self, clock: Clock, what: str) -> None:
        self.refuse(what)
        if clock:  # an event that was never recorded is complete
            found = self._record_of()
            found.waits.append(Wait(what, find_site(), found.launches))

    def replay(self, capture: Capture) -> None:
        super().replay(capture)
        self._record_of().launches += 1


class FakeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Runs operations on fake tensors of `CUDA`. Use it through `fake_gpu`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.record = Record()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.pinned: dict[int, torch.Tensor] = {}
        """Pinned host memory by its address, kept alive so that no other memory gets the address."""
        self.host_blocks: dict[int, tuple[Block, int]] = {}
        self.machine = Counting(lambda: self.record)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper doubles the time of an operation

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        parts = tensors(args, kwargs)
        if any(type(part) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for part in parts):
            return NotImplemented  # a library's own weight type, which calls torch for its parts
        if func.namespace == "c10d":
            return self._collective(func, args, parts)
        devices = [part for part in (*args, kwargs.get("device")) if isinstance(part, torch.device)]
        wanted = devices[0].type if devices else None
        if wanted != "cuda" and not any(isinstance(part, FakeTensor) for part in parts):
            return self._run_on_host(func, args, kwargs)
        if _is_composite(func):
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        return self._run(func, args, kwargs, parts, wanted)

    def kernel(self, name: str, moved: int, flops: int = 0, dtype: str = "", host_bytes: int = 0) -> None:
        """Record one kernel or copy."""
        made = Kernel(name, moved, flops, dtype, host_bytes)
        self.planned_kernel(lambda: made)

    def planned_kernel(self, make: Callable[[], Kernel]) -> None:
        """Record a kernel whose work a plan decides: a graph has that of the plan before each replay."""

        def run() -> None:
            if not self.machine.captures:
                self.record.kernels.append(make())

        self.machine.launch("kernel", (), (), run)
        self.record.launches += not self.machine.captures

    def wait(self, what: str) -> None:
        """Record that the host waits. Raises RuntimeError inside a capture."""
        self.machine.refuse(what)
        self.record.waits.append(Wait(what, find_site(), self.record.launches))

    def register(self, address: int, size: int, kind: str = "registered") -> Block:
        """Count host memory at `address` as pinned."""
        self.pinned[address] = torch.empty(0)
        self.host_blocks[address] = Block(kind, size), size
        return self.host_blocks[address][0]

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        """Count the memory of `host` as pinned."""
        self.pinned[host.untyped_storage().data_ptr()] = host
        return host

    def is_pinned(self, host: torch.Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self.pinned

    def to_device(self, host: torch.Tensor, device_tensor: torch.Tensor) -> None:
        """Record a copy from the host."""
        size = size_of(host)
        if not size:
            return
        if not self.is_pinned(host):
            self.wait("copy of pageable memory to the device")
        self.kernel("copy to device", size_of(device_tensor), host_bytes=size)

    def to_host(self, device_tensor: torch.Tensor, host: torch.Tensor, non_blocking: bool) -> None:
        """Record a copy to the host."""
        size = size_of(device_tensor)
        if not size:
            return
        if not (non_blocking and self.is_pinned(host)):
            self.wait("copy to the host")
        self.kernel("copy to host", size, host_bytes=size)

    def _run_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packet = func.overloadpacket
        if packet in (aten.pin_memory, aten._pin_memory):
            return self.pin(args[0].clone())
        if packet is aten.is_pinned:
            return self.is_pinned(args[0])
        if kwargs.get("pin_memory"):
            return self.pin(func(*args, **{**kwargs, "pin_memory": False}).zero_())
        return func(*args, **kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: list[torch.Tensor], wanted: str | None) -> Any:
        packet = func.overloadpacket
        if packet is aten._to_copy and wanted is not None and wanted != args[0].device.type:
            return self._copy_between(args[0], kwargs)
        if packet is aten.copy_ and args[0].device.type != args[1].device.type:
            return self._copy_into(args[0], args[1], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
        if any(part.device.type == "cpu" and (part.dim() or packet in (aten.index, aten.index_put, aten.index_put_)) for part in parts):
            raise MixedDevices(f"{func} mixes devices: {', '.join(f'{tuple(part.shape)} on {part.device}' for part in parts)}")
        if packet in READS:
            self.wait(f"{packet} reads a value")
            holds = packet is not aten._local_scalar_dense or args[0].dtype == torch.bool
            return True if holds else torch.zeros((), dtype=args[0].dtype).item()
        if packet in SHAPED or (packet is aten.repeat_interleave and kwargs.get("output_size") is None):
            self.wait(f"{packet} has a result whose shape depends on values")
            return self._shaped(packet, args)
        if packet in (aten.index, aten.index_put, aten.index_put_) and any(
            part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]
        ):
            self.wait(f"{packet} by a mask")
            args = (args[0], [None if part is None else self._chosen(part) for part in args[1]], *args[2:])
        with self.fake:
            out = func(*args, **kwargs)
        if not (packet in FREE or _is_view(func)) and any(part.numel() for part in tensors(out)):
            dtype = dtype_of(packet, args)
            name = f"{str(packet).removeprefix('aten.')} {dtype}".rstrip()
            self.kernel(name, bytes_of(packet, args, kwargs, out), flops_of(packet, args, kwargs, out), dtype)
        return out

    def _copy_between(self, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        dtype = kwargs.get("dtype") or source.dtype
        if source.device.type == "cpu":
            with self.fake:
                made = torch.empty_like(source, dtype=dtype, device=CUDA)
            self.to_device(source, made)
            return made
        host = torch.zeros(source.shape, dtype=dtype)
        if kwargs.get("pin_memory") or kwargs.get("non_blocking"):
            self.pin(host)
        self.to_host(source, host, bool(kwargs.get("non_blocking")))
        return host

    def _copy_into(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if source.device.type == "cpu":
            self.to_device(source, target)
        else:
            self.to_host(source, target, non_blocking)
            target.zero_()
        return target

    def _chosen(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the indices of one chosen element, as if a mask had one."""
        with self.fake:
            return torch.empty(1, dtype=torch.int64, device=mask.device)

    def _shaped(self, packet: Any, args: tuple[Any, ...]) -> Any:
        """Return a result of one element."""
        source = args[0]
        with self.fake:
            if packet is aten.nonzero:
                return torch.empty(1, source.dim(), dtype=torch.int64, device=CUDA)
            if packet in (aten.masked_select, aten.bincount, aten.repeat_interleave):
                return torch.empty(1, dtype=source.dtype, device=CUDA)
            values = torch.empty(1, *source.shape[1:], dtype=source.dtype, device=CUDA)
            return values, torch.empty(source.numel(), dtype=torch.int64, device=CUDA), torch.empty(1, dtype=torch.int64, device=CUDA)

    def _collective(self, func: Any, args: tuple[Any, ...], parts: list[torch.Tensor]) -> Any:
        raise AssertionError(f"{func} needs a process group: sharded models on a fake GPU have `FakeGroup`")


@cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


@cache
def _is_view(func: Any) -> bool:
    """Return whether a result shares memory with an argument that is not written."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def find_site() -> str:
    """Return the innermost function that is not torch's or this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in HIDDEN) and not path.startswith("<"):
            parts = path.split("/")
            return f"{parts[-2]}/{parts[-1]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


@contextmanager
def fake_gpu(memory: int = 141 << 30) -> Iterator[FakeGpu]:
    """Run the worker's GPU path in this context. `memory`: bytes of the device."""
    gpu = FakeGpu()
    memories: dict[str, Any] = {
        "cuda.mem_get_info": lambda device=None: (memory, memory),
        "cuda.memory_allocated": lambda device=None: 0,
        "cuda.max_memory_reserved": lambda device=None: 0,
        "cuda.reset_peak_memory_stats": lambda device=None: None,
        # torch reads the values of a fake tensor one by one, and those of a GPU with one copy.
        "_subclasses.fake_tensor.FakeTensor.tolist": lambda tensor: tensor.cpu().tolist(),
    }
    with replaced(parts_of(gpu.machine, gpu, PROCESSORS) | memories), gpu:
        yield gpu
