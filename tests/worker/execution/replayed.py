"""A replacement for CUDA graphs, and steps for them.

While a graph is recorded, every operation that reaches torch's dispatcher is kept with its tensors. A replay does the same operations on
the same tensors, and nothing else: what Python decided, and what it read on the host, is as it was, as on a GPU. What would wait for the
device there is refused as CUDA refuses it. FlashInfer's functions are kernels here: repeated whole, with their latest plan.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from bench.gpu import interpreter
from bench.gpu.batches import packed
from tests.worker.execution.waits import waits
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from fairlead_worker.execution.cuda_graphs.recorder import Cut
from fairlead_worker.kernels.base import KVSpec, PackedStep
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.model.loader import LoadedModel

PAGES, PAGE = 40, 4
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class Recording(TorchDispatchMode):
    """The operations of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # The last: a tensor made from host values.
        if waits(func, args) or func.overloadpacket is torch.ops.aten.lift_fresh:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, answer))
        return answer

    def replay(self) -> None:
        for func, args, kwargs, answer in self.calls:
            for old, new in zip(tree_leaves(answer), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # else it was in place, or a view
                    old.copy_(new)


class Replayed:
    """Implements `execution.graph_recorder.Recorder`."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        """Rows of each graph, or tokens if it has pieces, in recording order."""
        self.replays: list[int] = []
        """The replayed graphs, in order."""
        self.operations: list[int] = []
        """Number of operations of each graph."""

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return self.record_pieces(lambda cut: run())

    def record_pieces(self, run: Callable[[Cut], Any]) -> Callable[[], Any]:
        run(lambda between: between())  # as CudaRecorder: libraries initialise
        return self.capture(run)

    def capture(self, run: Callable[[Cut], Any]) -> Callable[[], Any]:
        """Record `run` without running it before."""
        steps, pieces = list[Callable[[], None]](), list[Recording]()

        def begin() -> None:
            pieces.append(piece.enter_context(Recording()))
            steps.append(pieces[-1].replay)

        def cut(between: Callable[[], None]) -> None:
            piece.close()
            steps.append(between)
            begin()

        with ExitStack() as piece:
            begin()
            output = run(cut)
        number = len(self.recorded)
        self.recorded.append(len(output) if isinstance(output, torch.Tensor) else output[0].shape[1])
        self.operations.append(sum(len(part.calls) for part in pieces))

        def replay() -> Any:
            self.replays.append(number)
            for step in steps:
                step()
            return output

        return replay


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as one operation of a recording."""

    def call(*args: Any, **kwargs: Any) -> Any:
        recording = _get_current_dispatch_mode()
        if not isinstance(recording, Recording):
            return function(*args, **kwargs)
        with _disable_current_modes():
            return recording.call(function, args, kwargs)

    return call


def _wrapper(kind: type) -> type:
    return type(kind.__name__, (kind,), {"run": lambda self, *args, **named: kernel(super(type(self), self).run)(*args, **named)})  # type: ignore[misc]  # the one class above


WRAPPERS = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper")
FUNCTIONS = (
    "append_paged_kv_cache", "append_paged_mla_kv_cache",
    "rope_quantize_fp8_append_paged_kv_cache", "rmsnorm", "gemma_rmsnorm", "fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "apply_rope_with_cos_sin_cache_inplace",
)  # fmt: skip
KERNELS: Any = SimpleNamespace(
    MLAPlanMetadata=interpreter.MLAPlanMetadata,
    **{name: _wrapper(getattr(interpreter, name)) for name in WRAPPERS},
    **{name: kernel(getattr(interpreter, name)) for name in FUNCTIONS},
)
"""FlashInfer, interpreted."""


def filled_backend(loaded: LoadedModel, pages: int = PAGES) -> FlashInferBackend:
    """Return a backend whose pages are full of random numbers."""
    made = FlashInferBackend(KVSpec(loaded.layers, PAGE, loaded.dtype, loaded.device), pages, KERNELS)
    drawn = torch.Generator().manual_seed(3)
    for part in (*made.keys, *made.values):
        part.copy_(torch.randn(part.shape, generator=drawn))
    return made


def decodes(rows: int, seed: int, adapters: Sequence[int] = ()) -> PackedStep:
    """Return `rows` requests of lengths around a page, each on its own pages."""
    drawn = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 2 * PAGE, (rows,), generator=drawn).tolist()
    order = torch.randperm(PAGES, generator=drawn).tolist()
    step = packed([(start, 1) for start in starts], [order[2 * i : 2 * i + 2] for i in range(rows)], PAGE, torch.device("cpu"))
    return replace(step, tokens=torch.randint(0, 500, (rows,), generator=drawn), sampling=torch.arange(rows), adapters=adapters)
