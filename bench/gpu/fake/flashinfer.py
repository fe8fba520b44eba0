"""FlashInfer on a fake GPU: what it checks of its arguments, what it copies while it plans, and what its kernels cost.

Its kernels have no results here. `bench.gpu.interpreter` computes them, on a CPU.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import torch

from bench.gpu.fake.costs import size_of
from bench.gpu.fake.gpu import FakeGpu, MixedDevices
from bench.gpu.fake.record import Kernel
from fairlead_worker.kernels.flashinfer_library import Library as AttentionLibrary
from fairlead_worker.model.fused.library import Library as FusedLibrary
from fairlead_worker.sampling.device_filters import FilterLibrary

KV = tuple[torch.Tensor, torch.Tensor]
HEAD_DIMS = (64, 128, 256)
FLOAT8 = torch.float8_e4m3fn
SIXTEEN = (torch.bfloat16, torch.float16)


class Library(AttentionLibrary, FusedLibrary, FilterLibrary):
    """The module `flashinfer`."""


def _on_device(name: str, *parts: torch.Tensor) -> None:
    if other := [tuple(part.shape) for part in parts if part.device.type != "cuda"]:
        raise MixedDevices(f"flashinfer.{name}: {other[0]} is on the host")


def _sixteen(name: str, *parts: torch.Tensor) -> None:
    _on_device(name, *parts)
    if len({part.dtype for part in parts}) != 1 or parts[0].dtype not in SIXTEEN:
        raise TypeError(f"flashinfer.{name} takes 16 bits of one dtype, not {', '.join(str(part.dtype) for part in parts)}")
    if any(part.stride(-1) != 1 for part in parts):
        raise ValueError(f"flashinfer.{name} takes tensors whose last dimension is contiguous")


class _Wrapper:
    name = ""

    def __init__(self, gpu: FakeGpu, workspace: torch.Tensor, kv_layout: str) -> None:
        _on_device(self.name, workspace)
        if kv_layout != "NHD" or workspace.dtype != torch.uint8:
            raise ValueError(f"flashinfer.{self.name}: workspace of {workspace.dtype} for layout {kv_layout}")
        self.gpu = gpu
        self._shape: tuple[int, int, int, int] | None = None
        self._queries = self._pairs = self._keys = 0

    def _plan(
        self,
        query_indptr: list[int],
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        shape: tuple[int, int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        window_left: int,
    ) -> None:
        for part in (indptr, last_page_len):
            if part.device.type != "cpu":
                self.gpu.wait(f"flashinfer.{self.name}.plan reads {tuple(part.shape)} from the device")
                raise MixedDevices(f"flashinfer.{self.name}.plan takes page tables on the host")
        if any(part.dtype != torch.int32 for part in (indptr, indices, last_page_len)) or dtypes[0] not in SIXTEEN:
            raise TypeError(f"flashinfer.{self.name}.plan takes int32 page tables and 16-bit queries")
        if dtypes[1] not in (dtypes[0], FLOAT8):
            raise TypeError(f"flashinfer.{self.name}.plan: KV of {dtypes[1]} for queries of {dtypes[0]}")
        self._kv_dtype = dtypes[1]
        heads, kv_heads, dim, page_size = shape
        if heads % kv_heads or dim not in HEAD_DIMS or indptr[-1] != len(indices) or len(query_indptr) != len(indptr):
            raise ValueError(f"flashinfer.{self.name}.plan: {heads} heads on {kv_heads} of {dim}, {len(indices)} pages")
        counts = [end - begin for begin, end in pairwise(query_indptr)]
        pages = (indptr[1:] - indptr[:-1]).tolist()
        lengths = [max(0, many - 1) * page_size + last if many else 0 for many, last in zip(pages, last_page_len.tolist(), strict=True)]
        seen = [min(length, window_left + count) if window_left >= 0 else length for length, count in zip(lengths, counts, strict=True)]
        self._shape, self._queries, self._keys = shape, query_indptr[-1], sum(seen)
        self._pairs = sum(count * many - count * (count - 1) // 2 for count, many in zip(counts, seen, strict=True))
        self.gpu.kernel("flashinfer schedule to device", 4096, host_bytes=4096)  # from its own pinned memory

    def run(
        self, q: torch.Tensor, paged_kv_cache: KV, *, out: torch.Tensor, k_scale: float | None = None, v_scale: float | None = None
    ) -> torch.Tensor:
        kv = paged_kv_cache
        _sixteen(self.name, q, out)
        _on_device(self.name, *kv)
        if self._shape is None:
            raise RuntimeError(f"flashinfer.{self.name} runs before a plan")
        if any(part.dtype != self._kv_dtype for part in kv):
            raise TypeError(f"flashinfer.{self.name}: KV of {kv[0].dtype} and {kv[1].dtype}, planned for {self._kv_dtype}")
        heads, kv_heads, dim, page_size = self._shape
        if q.shape != (self._queries, heads, dim) or out.shape != q.shape or kv[0].shape[1:] != (page_size, kv_heads, dim):
            raise ValueError(f"flashinfer.{self.name}: queries {tuple(q.shape)} for {self._queries} of {heads} heads of {dim}")
        moved, item, dtype = size_of(q) + size_of(out), kv[0].element_size(), str(q.dtype)[6:]

        def kernel() -> Kernel:
            read = 2 * self._keys * kv_heads * dim * item
            return Kernel(f"flashinfer.{self.name}", read + moved, 4 * self._pairs * heads * dim, dtype)

        self.gpu.planned_kernel(kernel)
        if v_scale is not None and v_scale != 1.0:
            out *= v_scale
        return out


class _Prefill(_Wrapper):
    name = "prefill"

    def __init__(
        self,
        gpu: FakeGpu,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
    ) -> None:
        super().__init__(gpu, float_workspace_buffer, kv_layout)
        self._backend = backend
        given = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self._buffers = [part for part in given if part is not None]
        self._most = 0
        if len(self._buffers) != (4 if use_cuda_graph else 0):
            raise ValueError("flashinfer.prefill: a graph needs four buffers")
        _on_device(self.name, *self._buffers)
        if backend == "fa3":
            self.name = "prefill fa3"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        window_left: int = -1,
        **_: Any,
    ) -> None:
        if self._backend == "fa3" and kv_data_type != q_data_type:
            raise TypeError(f"flashinfer.prefill fa3: KV of {kv_data_type} for queries of {q_data_type}")
        parts = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        if self._buffers:
            self._most = self._most or int(qo_indptr[-1])
            if len(qo_indptr) != len(self._buffers[0]) or int(qo_indptr[-1]) > self._most:
                raise ValueError(f"flashinfer.prefill: {len(qo_indptr) - 1} rows of {int(qo_indptr[-1])} for a graph of {self._most}")
            if paged_kv_indices.device.type == "cpu":
                self.gpu.wait("flashinfer.prefill.plan copies page indices into a graph's buffer after all queued work")
            for buffer, part in zip(self._buffers, parts, strict=True):
                buffer[: len(part)].copy_(part, non_blocking=True)
        for part in parts if not self._buffers else ():
            part.to("cuda", non_blocking=True)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        paged = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(qo_indptr.tolist(), *paged, shape, (q_data_type, kv_data_type), window_left)


class _Decode(_Wrapper):
    name = "decode"

    def __init__(
        self,
        gpu: FakeGpu,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        use_tensor_cores: bool,
        backend: str,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        super().__init__(gpu, float_workspace_buffer, kv_layout)
        self._buffers: list[torch.Tensor] = []
        if use_cuda_graph:
            given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            self._buffers = [part for part in given if part is not None]
            _on_device(self.name, *self._buffers)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        window_left: int = -1,
        **_: Any,
    ) -> None:
        parts = (indptr, indices, last_page_len)
        if self._buffers and len(last_page_len) != len(self._buffers[2]):
            raise ValueError(f"flashinfer.decode: {len(last_page_len)} rows for a graph of {len(self._buffers[2])}")
        if self._buffers and indices.device.type == "cpu":
            self.gpu.wait("flashinfer.decode.plan copies page indices into a graph's buffer after all queued work")
        for place, part in enumerate(parts):
            if self._buffers:
                self._buffers[place][: len(part)].copy_(part, non_blocking=True)
            else:
                part.to("cuda", non_blocking=True)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(list(range(len(indptr))), indptr, indices, last_page_len, shape, (q_data_type, kv_data_type), window_left)


def make_library(gpu: FakeGpu) -> Library:
    """Return FlashInfer for `gpu`."""

    def append(
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        kv: KV,
        indices: torch.Tensor,
        indptr: torch.Tensor,
        last: torch.Tensor,
        layout: str,
    ) -> None:
        tables = (rows, positions, indices, indptr, last)
        _on_device("append_paged_kv_cache", *tables)
        _on_device("append_paged_kv_cache", key, value, *kv)
        if len({part.dtype for part in (key, value, *kv)}) != 1 or kv[0].dtype not in (*SIXTEEN, FLOAT8):
            raise TypeError(f"flashinfer.append_paged_kv_cache: {key.dtype} for pages of {kv[0].dtype}")
        if any(part.dtype != torch.int32 for part in tables) or key.shape[1:] != kv[0].shape[2:] or len(rows) != len(key):
            raise ValueError(f"flashinfer.append_paged_kv_cache: {tuple(key.shape)} for pages {tuple(kv[0].shape)}")
        gpu.kernel("flashinfer.append_paged_kv_cache", 2 * (size_of(key) + size_of(value)))

    def quantize_append(
        q_rope: torch.Tensor,
        k_rope: torch.Tensor,
        q_nope: torch.Tensor | None,
        k_nope: torch.Tensor | None,
        v: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        pos_ids: torch.Tensor,
        paged_kv_cache: KV,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        *,
        quantize_dtype: torch.dtype,
        quant_scale_kv: float,
        page_size: int,
        kv_layout: str,
    ) -> None:
        name, tables = "rope_quantize_fp8_append_paged_kv_cache", (kv_indices, kv_indptr, batch_indices, positions, pos_ids)
        _on_device(name, q_rope, cos_sin_cache, *tables, *paged_kv_cache)
        _sixteen(name, k_rope, v)
        dtypes = {part.dtype for part in paged_kv_cache}
        if dtypes != {quantize_dtype} or cos_sin_cache.dtype != torch.float32 or any(part.dtype != torch.int32 for part in tables):
            raise TypeError(f"flashinfer.{name}: pages of {paged_kv_cache[0].dtype}, angles of {cos_sin_cache.dtype}")
        if cos_sin_cache.shape[1] != k_rope.shape[2] or any(len(part) != len(k_rope) for part in (v, batch_indices, positions, pos_ids)):
            raise ValueError(f"flashinfer.{name}: {tuple(k_rope.shape)} with angles of {tuple(cos_sin_cache.shape)}")
        if k_rope.shape[1:] != paged_kv_cache[0].shape[2:] or paged_kv_cache[0].shape[1] != page_size:
            raise ValueError(f"flashinfer.{name}: {tuple(k_rope.shape)} for pages {tuple(paged_kv_cache[0].shape)}")
        gpu.kernel(f"flashinfer.{name}", 3 * (size_of(k_rope) + size_of(v)) // 2)

    def norm(name: str, most_dims: int) -> Any:
        def call(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            _sixteen(name, input, weight)
            if input.dim() > most_dims or weight.shape != input.shape[-1:]:
                raise ValueError(f"flashinfer.{name}: {tuple(input.shape)} with {tuple(weight.shape)}")
            gpu.kernel(f"flashinfer.{name}", 2 * size_of(input) + size_of(weight))
            return torch.empty_like(input)

        return call

    def add_norm(name: str) -> Any:
        def call(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
            _sixteen(name, input, residual, weight)
            if input.dim() != 2 or input.shape != residual.shape:
                raise ValueError(f"flashinfer.{name}: {tuple(input.shape)} and {tuple(residual.shape)}")
            gpu.kernel(f"flashinfer.{name}", 4 * size_of(input) + size_of(weight))

        return call

    def activate(name: str) -> Any:
        def call(input: torch.Tensor) -> torch.Tensor:
            _sixteen(name, input)
            if not input.is_contiguous():
                raise ValueError(f"flashinfer.{name} takes a contiguous tensor")
            gpu.kernel(f"flashinfer.{name}", size_of(input) * 3 // 2)
            return input.new_empty(*input.shape[:-1], input.shape[-1] // 2)

        return call

    def rope(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor) -> None:
        _on_device("rope", positions, cos_sin_cache)
        _sixteen("rope", query, key)
        if cos_sin_cache.dtype != torch.float32 or positions.shape != query.shape[:1] or head_size not in HEAD_DIMS:
            raise ValueError(f"flashinfer.rope: table of {cos_sin_cache.dtype}, heads of {head_size}")
        table = len(positions) * cos_sin_cache.shape[1] * 4
        gpu.kernel("flashinfer.apply_rope", 2 * (size_of(query) + size_of(key)) + table)

    def top_k(input: torch.Tensor, k: int, sorted: bool, deterministic: bool, tie_break: int) -> tuple[torch.Tensor, torch.Tensor]:
        _on_device("top_k", input)
        if input.dim() != 2 or not input.is_contiguous() or not 0 < k <= min(2048, input.shape[1]):
            raise ValueError(f"flashinfer.top_k: {k} of {tuple(input.shape)}")
        values, indices = input.new_empty(len(input), k), input.new_empty(len(input), k, dtype=torch.int32)
        found = size_of(values) + size_of(indices)
        gpu.kernel("flashinfer.top_k", 2 * size_of(input) + found)  # the second time it collects
        for _ in range(2):  # by index, then by value
            gpu.kernel("flashinfer.top_k sort", 2 * found)
        return values, indices.long()

    def top_p(probs: torch.Tensor, top_p: torch.Tensor, is_deterministic: bool) -> torch.Tensor:
        _on_device("top_p_renorm_probs", probs, top_p)
        if probs.dtype != torch.float32 or not probs.is_contiguous() or top_p.shape != probs.shape[:1] or top_p.dtype != torch.float32:
            raise ValueError(f"flashinfer.top_p_renorm_probs: {probs.dtype} with {top_p.dtype} {tuple(top_p.shape)}")
        gpu.kernel("flashinfer.top_p start", 2048 * 12 * len(probs))
        for _ in range(3):  # 11 bits of the threshold each; the third reads what the second has left, which may be all
            gpu.kernel("flashinfer.top_p pass", size_of(probs))
        gpu.kernel("flashinfer.top_p apply", 3 * size_of(probs))
        return torch.empty_like(probs)

    norms = {"rmsnorm": norm("rmsnorm", 3), "gemma_rmsnorm": norm("gemma_rmsnorm", 2)}
    adds = {name: add_norm(name) for name in ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm")}
    activations = {name: activate(name) for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")}
    made = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=lambda *args, **named: _Prefill(gpu, *args, **named),
        BatchDecodeWithPagedKVCacheWrapper=lambda *args, **named: _Decode(gpu, *args, **named),
        append_paged_kv_cache=append,
        rope_quantize_fp8_append_paged_kv_cache=quantize_append,
        apply_rope_with_cos_sin_cache_inplace=rope,
        top_k=top_k,
        top_p_renorm_probs=top_p,
        **norms,
        **adds,
        **activations,
    )
    return cast(Library, made)
