"""FlashInfer on the fake GPU: where its arguments must be, what it copies while it plans, and what its kernels cost.

Its kernels have no results here: `bench.gpu.interpreter` computes them, on a CPU, and refuses arguments that the library refuses.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import torch
from tests.worker.fake_gpu.device.costs import size_of
from tests.worker.fake_gpu.device.gpu import FakeGpu, MixedDevices
from tests.worker.fake_gpu.device.record import Kernel

from fairlead_worker.kernels.flashinfer_library import Library as AttentionLibrary
from fairlead_worker.model.fused.library import Library as FusedLibrary

KV = tuple[torch.Tensor, torch.Tensor]
FLOAT8 = torch.float8_e4m3fn


class Library(AttentionLibrary, FusedLibrary):
    """The module `flashinfer`."""


def _on_device(name: str, *parts: torch.Tensor) -> None:
    if other := [tuple(part.shape) for part in parts if part.device.type != "cuda"]:
        raise MixedDevices(f"flashinfer.{name}: {other[0]} is on the host")


class Wrapper:
    """Attention of rows with page tables. `buffers`: of a CUDA graph."""

    def __init__(self, gpu: FakeGpu, name: str, workspace: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        _on_device(name, workspace, *buffers)
        self.gpu, self.name, self._buffers = gpu, name, buffers
        self._shape: tuple[int, int, int, int] | None = None
        self._queries = self._pairs = self._keys = 0

    def _plan(
        self,
        query_indptr: list[int],
        parts: tuple[torch.Tensor, ...],
        shape: tuple[int, int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        window_left: int,
    ) -> None:
        """`parts`: the tables that are copied to the device, of which the last three are `indptr`, `indices` and `last_page_len`."""
        indptr, indices, last_page_len = parts[-3:]
        if any(part.device.type != "cpu" for part in (indptr, last_page_len)):
            self.gpu.wait(f"flashinfer.{self.name}.plan reads page tables from the device")
            raise MixedDevices(f"flashinfer.{self.name}.plan takes page tables on the host")
        if dtypes[1] not in (dtypes[0], FLOAT8) or (self.name == "prefill fa3" and dtypes[1] != dtypes[0]):
            raise TypeError(f"flashinfer.{self.name}.plan: KV of {dtypes[1]} for queries of {dtypes[0]}")
        if self._buffers and indices.device.type == "cpu":
            self.gpu.wait(f"flashinfer.{self.name}.plan copies page indices into a graph's buffer after all queued work")
        for place, part in enumerate(parts):
            if self._buffers:
                self._buffers[place][: len(part)].copy_(part, non_blocking=True)
            else:
                part.to("cuda", non_blocking=True)
        counts = [end - begin for begin, end in pairwise(query_indptr)]
        pages = (indptr[1:] - indptr[:-1]).tolist()
        lengths = [max(0, many - 1) * shape[3] + last if many else 0 for many, last in zip(pages, last_page_len.tolist(), strict=True)]
        seen = [min(length, window_left + count) if window_left >= 0 else length for length, count in zip(lengths, counts, strict=True)]
        self._shape, self._kv_dtype, self._queries, self._keys = shape, dtypes[1], query_indptr[-1], sum(seen)
        self._pairs = sum(count * many - count * (count - 1) // 2 for count, many in zip(counts, seen, strict=True))
        self.gpu.kernel("flashinfer schedule to device", 4096, host_bytes=4096)  # from its own pinned memory

    def run(
        self, q: torch.Tensor, paged_kv_cache: KV, *, out: torch.Tensor, k_scale: float | None = None, v_scale: float | None = None
    ) -> torch.Tensor:
        _on_device(self.name, q, out, *paged_kv_cache)
        if self._shape is None:
            raise RuntimeError(f"flashinfer.{self.name} runs before a plan")
        if any(part.dtype != self._kv_dtype for part in paged_kv_cache):
            raise TypeError(f"flashinfer.{self.name}: KV of {paged_kv_cache[0].dtype}, planned for {self._kv_dtype}")
        heads, kv_heads, dim, _ = self._shape
        if q.shape != (self._queries, heads, dim):
            raise ValueError(f"flashinfer.{self.name}: queries {tuple(q.shape)} for {self._queries} of {heads} heads of {dim}")
        moved, item, dtype = size_of(q) + size_of(out), paged_kv_cache[0].element_size(), str(q.dtype)[6:]

        def kernel() -> Kernel:
            read = 2 * self._keys * kv_heads * dim * item
            return Kernel(f"flashinfer.{self.name}", read + moved, 4 * self._pairs * heads * dim, dtype)

        self.gpu.planned_kernel(kernel)
        if v_scale is not None and v_scale != 1.0:
            out *= v_scale
        return out


class Prefill(Wrapper):
    def __init__(self, gpu: FakeGpu, workspace: torch.Tensor, layout: str, *, backend: str, use_cuda_graph: bool = False, **buffers: Any):
        super().__init__(gpu, "prefill fa3" if backend == "fa3" else "prefill", workspace, list(buffers.values()) if use_cuda_graph else [])

    def plan(
        self,
        query: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        *shape: Any,
        window_left: int,
        **named: Any,
    ) -> None:
        dtypes = named["q_data_type"], named["kv_data_type"]
        self._plan(query.tolist(), (query, indptr, indices, last), shape, dtypes, window_left)


class Decode(Wrapper):
    def __init__(
        self, gpu: FakeGpu, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool, backend: str, use_cuda_graph: bool = False,
        **buffers: Any,
    ):  # fmt: skip
        super().__init__(gpu, "decode", workspace, list(buffers.values()) if use_cuda_graph else [])

    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *shape: Any, window_left: int, **named: Any) -> None:
        if self._buffers and len(last) != len(self._buffers[2]):
            raise ValueError(f"flashinfer.decode: {len(last)} rows for a graph of {len(self._buffers[2])}")
        self._plan(list(range(len(indptr))), (indptr, indices, last), shape, (named["q_data_type"], named["kv_data_type"]), window_left)


def make_library(gpu: FakeGpu) -> Library:
    """Return FlashInfer for `gpu`."""

    def append(key: torch.Tensor, value: torch.Tensor, rows: Any, positions: Any, kv: KV, *tables: Any) -> None:
        _on_device("append_paged_kv_cache", rows, positions, *tables[:3], key, value, *kv)
        if len({part.dtype for part in (key, value, *kv)}) != 1:
            raise TypeError(f"flashinfer.append_paged_kv_cache: {key.dtype} for pages of {kv[0].dtype}")
        gpu.kernel("flashinfer.append_paged_kv_cache", 2 * (size_of(key) + size_of(value)))

    def quantize_append(
        query: torch.Tensor, key: torch.Tensor, _: None, __: None, value: torch.Tensor, angles: torch.Tensor, ids: torch.Tensor, kv: KV,
        *tables: torch.Tensor, **settings: Any,
    ) -> None:  # fmt: skip
        name = "rope_quantize_fp8_append_paged_kv_cache"
        _on_device(name, query, key, value, angles, ids, *kv, *tables)
        if {part.dtype for part in kv} != {settings["quantize_dtype"]}:
            raise TypeError(f"flashinfer.{name}: pages of {kv[0].dtype}")
        gpu.kernel(f"flashinfer.{name}", 3 * (size_of(key) + size_of(value)) // 2)

    def norm(name: str) -> Any:
        def call(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            _on_device(name, input, weight)
            gpu.kernel(f"flashinfer.{name}", 2 * size_of(input) + size_of(weight))
            return torch.empty_like(input)

        return call

    def add_norm(name: str) -> Any:
        def call(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
            _on_device(name, input, residual, weight)
            gpu.kernel(f"flashinfer.{name}", 4 * size_of(input) + size_of(weight))

        return call

    def activate(name: str) -> Any:
        def call(input: torch.Tensor) -> torch.Tensor:
            _on_device(name, input)
            gpu.kernel(f"flashinfer.{name}", size_of(input) * 3 // 2)
            return input.new_empty(*input.shape[:-1], input.shape[-1] // 2)

        return call

    def rope(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor) -> None:
        _on_device("rope", positions, cos_sin_cache, query, key)
        table = len(positions) * cos_sin_cache.shape[1] * 4
        gpu.kernel("flashinfer.apply_rope", 2 * (size_of(query) + size_of(key)) + table)

    made = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=lambda *args, **named: Prefill(gpu, *args, **named),
        BatchDecodeWithPagedKVCacheWrapper=lambda *args, **named: Decode(gpu, *args, **named),
        append_paged_kv_cache=append,
        rope_quantize_fp8_append_paged_kv_cache=quantize_append,
        apply_rope_with_cos_sin_cache_inplace=rope,
        **{name: norm(name) for name in ("rmsnorm", "gemma_rmsnorm")},
        **{name: add_norm(name) for name in ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm")},
        **{name: activate(name) for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")},
    )
    return cast(Library, made)
