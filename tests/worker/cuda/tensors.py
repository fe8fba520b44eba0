"""Tensors of the modelled device: values in CPU memory, `device` cuda:0, and each operation launched on a `Machine`."""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from tests.worker.cuda.machine import Block, Capture, Machine, Span
from tests.worker.execution.waits import waits
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
GARBAGE = 0x5A
"""Byte in memory that only a replay fills."""
aten = torch.ops.aten


class Handle:
    """What all tensors of a device block share; the block is freed with the last of them."""

    def __init__(self, machine: Machine, block: Block, forget: Callable[[], object]) -> None:
        self.block, self._machine, self._forget = block, machine, forget

    def __del__(self) -> None:
        self._forget()
        self._machine.free(self.block)


class DeviceTensor(torch.Tensor):
    """A tensor on the modelled device."""

    inner: torch.Tensor  # type: ignore[assignment]  # hides a product of vectors
    handle: Handle

    @staticmethod
    def __new__(cls, inner: torch.Tensor, handle: Handle) -> "DeviceTensor":
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # as torch's own subclasses
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=CUDA,
            requires_grad=False,
        )
        made.inner, made.handle = inner, handle
        return made

    def __init__(self, inner: torch.Tensor, handle: Handle) -> None:
        pass

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        self.handle.block.recorded.add(stream.stream_id)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        raise AssertionError(f"{func} outside the model")


class DeviceMode(TorchDispatchMode):
    """Runs operations on device tensors on the machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self._handles: dict[int, weakref.ref[Handle]] = {}
        """Of device blocks, by storage."""
        self.host_blocks: dict[int, tuple[Block, int]] = {}
        """Host memory that the device copies from or to, by first address, with its size."""
        self.pageable = 0
        """Copies between the device and pageable memory."""

    # Memory

    def adopt(self, inner: torch.Tensor) -> DeviceTensor:
        """Return `inner` as device memory that was filled long ago."""
        return self._wrap(inner, self._handle(inner, Block("device", inner.untyped_storage().nbytes(), 1)))

    def register(self, address: int, size: int, kind: str = "registered") -> Block:
        block = Block(kind, size)
        self.host_blocks[address] = block, size
        return block

    def span(self, tensor: torch.Tensor) -> Span:
        """Return the memory of a device tensor."""
        assert isinstance(tensor, DeviceTensor)
        return _extent(tensor.inner, tensor.handle.block, 0)

    def host_span(self, tensor: torch.Tensor) -> Span | None:
        """Return the memory of a host tensor that the device can access; None if it is pageable."""
        if not self.host_blocks or not tensor.numel():
            return None
        address = tensor.data_ptr()
        for begin, (block, size) in self.host_blocks.items():
            if begin <= address < begin + size:
                return _extent(tensor, block, tensor.untyped_storage().data_ptr() - begin)
        return None

    def _handle(self, inner: torch.Tensor, block: Block) -> Handle:
        key, handles = inner.untyped_storage()._cdata, self._handles
        handle = Handle(self.machine, block, lambda: handles.pop(key, None))
        self._handles[key] = weakref.ref(handle)
        return handle

    def _wrap(self, inner: torch.Tensor, handle: Handle) -> DeviceTensor:
        with torch.inference_mode(False):  # views of tensors from outside inference mode are ordinary tensors, so all are
            return DeviceTensor(inner, handle)

    def _found(self, inner: torch.Tensor) -> Handle | None:
        found = self._handles.get(inner.untyped_storage()._cdata)
        return None if found is None else found()

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` in memory from torch's pinned cache, which gives it out again once its copies are complete."""
        self.machine.begin("pinned allocation")
        self.machine.refuse("pinned allocation")
        key = values.data_ptr()
        if values.numel():
            self.register(key, values.untyped_storage().nbytes(), "pinned")
            weakref.finalize(values.untyped_storage(), self.host_blocks.pop, key, None)
        return values

    # Dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in (aten.pin_memory, aten._pin_memory):
            self._touch(args[:1], (), "a copy to pinned memory")
            return self.pin(args[0].clone(memory_format=torch.contiguous_format))
        if packet is aten.is_pinned:
            return self.host_span(args[0]) is not None
        if packet is aten.resolve_conj and not isinstance(args[0], DeviceTensor):  # `tolist` and `numpy` read it
            self._touch(args, (), "a read")
            return args[0]
        target = kwargs.get("device")
        parts = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        on_device = any(isinstance(part, DeviceTensor) for part in parts)
        is_target = target is not None and torch.device(target).type == "cuda"
        if _is_composite(func):
            with self:
                answer = func.decompose(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        if not on_device and not is_target:
            return self._on_host(func, args, kwargs, parts)
        if packet is aten._to_copy:
            return self._to_copy(args[0], kwargs, to_host=target is not None and not is_target)
        if packet is aten.copy_ and not all(isinstance(part, DeviceTensor) for part in args[:2]):
            return self._copy(args[0], args[1], bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking")))
        return self._on_device(func, args, kwargs, parts)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: list[torch.Tensor]) -> Any:
        if kwargs.get("pin_memory"):
            return self.pin(func(*args, **{**kwargs, "pin_memory": False}))
        if self.host_blocks and parts:
            written = _written(func, args, kwargs)
            if not _is_view(func):
                self._touch([part for part in parts if not _is_in(part, written)], written, str(func))
        return func(*args, **kwargs)

    def _touch(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], what: str) -> None:
        seen, changed = ([span for part in some if (span := self.host_span(part))] for some in (reads, writes))
        if seen or changed:
            self.machine.touch(f"{what} on the host", seen, changed)

    def _to_copy(self, source: torch.Tensor, kwargs: dict[str, Any], to_host: bool) -> torch.Tensor:
        named = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
        if isinstance(source, DeviceTensor) and not to_host:
            return self._on_device(aten._to_copy.default, (source,), named, [source])
        inner = source.inner if isinstance(source, DeviceTensor) else source
        made = torch.empty_like(aten._to_copy.default(inner, **named))
        if not to_host:
            made = self._take(made)
        self._copy(made, source, bool(kwargs.get("non_blocking")))
        return made

    def _take(self, inner: torch.Tensor) -> DeviceTensor:
        """Allocate device memory for a new tensor."""
        block = self.machine.allocate(inner.untyped_storage().nbytes())
        if block.captured is not None:
            block.captured.made.append((block, lambda: _spoil(inner, block)))
        return self._wrap(inner, self._handle(inner, block))

    def _copy(self, to: torch.Tensor, source: torch.Tensor, asynchronous: bool) -> torch.Tensor:
        """Copy between host and device."""
        machine = self.machine
        host, device = (source, to) if isinstance(to, DeviceTensor) else (to, source)
        assert isinstance(device, DeviceTensor)
        inner = device.inner
        span = self.host_span(host)
        if isinstance(to, DeviceTensor):
            what, reads, writes = "a copy to the device", [span] if span else [], [self.span(to)]
            content = host if span else host.clone()
            run = lambda: inner.copy_(content)  # noqa: E731  # beside the other
        else:
            what, reads, writes = "a copy to the host", [self.span(device)], [span] if span else []
            run = lambda: host.copy_(inner)  # noqa: E731
        if span is None and host.numel():
            self.pageable += 1
            what = f"{what} of pageable memory"
            machine.refuse(what)
        machine.begin_work(what)
        self._save(machine.current.capture, device if isinstance(to, DeviceTensor) else None)
        machine.launch(what, reads, writes, run)
        if not isinstance(to, DeviceTensor) and not (asynchronous and span):
            machine.wait(machine.current.clock, what)
        return to

    def _save(self, capture: Capture | None, written: DeviceTensor | None) -> None:
        """Keep what an operation of a capture changes, because a capture changes nothing."""
        if capture is None or written is None:
            return
        block = written.handle.block
        if block in capture.saved or block.captured is capture:
            return
        whole = torch.empty(0, dtype=torch.uint8).set_(written.inner.untyped_storage())  # type: ignore[call-overload]  # a storage
        kept = whole.clone()

        def restore() -> None:
            with _disable_current_modes():
                whole.copy_(kept)

        capture.saved[block] = restore

    def _on_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: list[torch.Tensor]) -> Any:
        machine = self.machine
        for part in parts:
            if not isinstance(part, DeviceTensor) and part.dim():
                if func.overloadpacket not in (aten.index, aten.index_put, aten.index_put_):
                    raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
                self.pageable += 1  # torch copies a host index
                machine.refuse(f"{func} with an index in pageable memory")
        named = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        inner_args, inner_kwargs = tree_map(_inner, (args, named))
        if waits(func, args):
            machine.begin_work(str(func))
            machine.launch(str(func), [self.span(part) for part in parts if isinstance(part, DeviceTensor)], [], _nothing)
            machine.wait(machine.current.clock, str(func))
            return tree_map(self._place, func(*inner_args, **inner_kwargs))
        if _is_view(func):
            return tree_map(lambda answer: self._again(answer, parts), func(*inner_args, **inner_kwargs))
        written = [part for part in _written(func, args, kwargs) if isinstance(part, DeviceTensor)]
        return self.kernel(str(func), func, args, named, written)

    def kernel(
        self, what: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[torch.Tensor] = ()
    ) -> Any:
        """Launch `function` on the current stream; tensors of `written` are its outputs, other arguments its inputs."""
        machine = self.machine
        parts = [part for part in tree_leaves((args, kwargs)) if isinstance(part, DeviceTensor)]
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        machine.begin_work(what)
        for part in written:
            self._save(machine.current.capture, part)  # type: ignore[arg-type]  # of the device
        answers: list[Any] = []

        def run() -> None:
            with _disable_current_modes():
                answer = function(*inner_args, **inner_kwargs)
                if not answers:
                    answers.append(answer)
                    return
                for old, new in zip(tree_leaves(answers[0]), tree_leaves(answer), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        reads = [self.span(part) for part in parts if not _is_in(part, written)]
        writes = [self.span(part) for part in written]
        run()
        made: list[DeviceTensor] = []

        def placed(answer: Any) -> Any:
            if not isinstance(answer, torch.Tensor):
                return answer
            if self._found(answer) is None:
                made.append(self._take(answer))
                return made[-1]
            return self._again(answer, parts)

        result = tree_map(placed, answers[0])
        is_first = [True]  # the first run comes before the launch: it shows which memory the answer needs

        def launched() -> None:
            if is_first:
                is_first.clear()
            else:
                run()

        machine.launch(what, reads, [*writes, *(self.span(part) for part in made)], launched)
        return result

    def _place(self, answer: Any) -> Any:
        return self._take(answer) if isinstance(answer, torch.Tensor) else answer

    def _again(self, answer: Any, parts: Sequence[torch.Tensor]) -> Any:
        """Return the tensor of `parts` that `answer` is, or a view of their memory."""
        if not isinstance(answer, torch.Tensor):
            return answer
        for part in parts:
            if isinstance(part, DeviceTensor) and part.inner is answer:
                return part
        handle = self._found(answer)
        return self._take(answer) if handle is None else self._wrap(answer, handle)


def _inner(part: Any) -> Any:
    return part.inner if isinstance(part, DeviceTensor) else part


def _nothing() -> None:
    pass


def _spoil(inner: torch.Tensor, block: Block) -> None:
    if not block.is_freed:
        with _disable_current_modes():
            torch.empty(0, dtype=torch.uint8).set_(inner.untyped_storage()).fill_(GARBAGE)  # type: ignore[call-overload]  # a storage


@cache
def _is_composite(func: Any) -> bool:
    return bool(func._can_decompose())


def _is_in(part: torch.Tensor, some: Sequence[torch.Tensor]) -> bool:
    return any(part is other for other in some)


@cache
def _is_view(func: Any) -> bool:
    """Return whether the operation makes another view, or changes a tensor's shape alone."""
    if func.overloadpacket in (aten.detach_, aten.lift_fresh, aten._unsafe_view, aten.t_, aten.unsqueeze_, aten.squeeze_, aten.lift):
        return True
    infos = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return bool(infos) and not any(info.is_write for info in infos)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    values = [args[place] if place < len(args) else kwargs.get(name) for place, name in _outputs(func)]
    return [part for part in tree_leaves(values) if isinstance(part, torch.Tensor)]


@cache
def _outputs(func: Any) -> list[tuple[int, str]]:
    """Return place and name of the arguments that the operation writes."""
    arguments = enumerate(func._schema.arguments)
    return [(place, argument.name) for place, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]


def _extent(tensor: torch.Tensor, block: Block, shift: int) -> Span:
    """Return the bytes from a tensor's first to its last element."""
    if not tensor.numel():
        return Span(block, 0, 0)
    begin = shift + tensor.storage_offset() * tensor.element_size()
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(block, begin, begin + length * tensor.element_size())
