"""FlashInfer on the modelled device: what its kernels and plans read and write, and on which stream.

Like the library (0.7.2), each wrapper stages its schedule in pinned memory of its own, copies it to its device workspace by one
asynchronous copy on the current stream, and gives no sign when that copy is complete.
"""

from types import SimpleNamespace
from typing import Any

import torch
from bench.gpu import interpreter
from tests.worker.cuda.tensors import CUDA, DeviceMode, DeviceTensor

SCHEDULE = 64
"""Bytes of a schedule."""


def make_library(mode: DeviceMode) -> Any:
    """Return the part of FlashInfer that the worker uses."""

    class Staged:
        """A wrapper's schedule in pinned memory and on the device."""

        def __init__(self, workspace: torch.Tensor) -> None:
            self.workspace = workspace
            self.staging = torch.empty(SCHEDULE, dtype=torch.uint8, pin_memory=True)
            self.schedule = torch.empty(SCHEDULE, dtype=torch.uint8, device=workspace.device)
            self.tables: list[torch.Tensor] = []

        def stage(self) -> None:
            self.staging.fill_(1)
            self.schedule.copy_(self.staging, non_blocking=True)

        def run(self, plan: Any, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, *scales: Any) -> torch.Tensor:
            def attend(q: Any, keys: Any, values: Any, out: Any, *read: Any) -> None:
                plan().run(q, (keys, values), out, *scales)

            mode.kernel("attention", attend, (q, *kv, out, self.schedule, self.workspace, *self.tables), {}, [out, self.workspace])
            return out

    class Prefill:
        def __init__(self, workspace: torch.Tensor, layout: str, *, backend: str, use_cuda_graph: bool = False, **buffers: Any) -> None:
            self._staged = Staged(workspace)
            self._inner = interpreter.BatchPrefillWithPagedKVCacheWrapper(_inner(workspace), layout, backend=backend)
            self._buffers = list(buffers.values()) if use_cuda_graph else None

        def plan(self, query: Any, indptr: Any, indices: Any, last: Any, *shape: Any, **settings: Any) -> None:
            self._inner.plan(query, indptr, _inner(indices), last, *shape, **settings)
            device = self._staged.workspace.device
            if self._buffers is None:
                self._staged.tables = [part.to(device, non_blocking=True) for part in (query, indptr, indices, last)]
            else:
                for buffer, part in zip(self._buffers, (query, indptr, indices, last), strict=True):
                    buffer[: len(part)].copy_(part, non_blocking=True)
                self._staged.tables = list(self._buffers)
            self._staged.stage()

        def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor, k_scale: Any, v_scale: Any) -> torch.Tensor:
            return self._staged.run(lambda: self._inner._plan, q, paged_kv_cache, out, k_scale, v_scale)

    class Decode:
        def __init__(
            self,
            workspace: torch.Tensor,
            layout: str,
            *,
            use_tensor_cores: bool,
            backend: str,
            use_cuda_graph: bool = False,
            paged_kv_indptr_buffer: Any = None,
            paged_kv_indices_buffer: Any = None,
            paged_kv_last_page_len_buffer: Any = None,
        ) -> None:
            self._staged = Staged(workspace)
            self._inner = interpreter.BatchDecodeWithPagedKVCacheWrapper(
                _inner(workspace), layout, use_tensor_cores=use_tensor_cores, backend=backend
            )
            self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer) if use_cuda_graph else None

        def plan(self, indptr: Any, indices: Any, last: Any, *shape: Any, **settings: Any) -> None:
            self._inner.plan(indptr, _inner(indices), last, *shape, **settings)
            device = self._staged.workspace.device
            if self._buffers is None:
                self._staged.tables = [part.to(device, non_blocking=True) for part in (indptr, indices, last)]
            else:
                for buffer, part in zip(self._buffers, (indptr, indices, last), strict=True):
                    buffer[: len(part)].copy_(part, non_blocking=True)
                self._staged.tables = list(self._buffers)
            self._staged.stage()

        def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor, k_scale: Any, v_scale: Any) -> torch.Tensor:
            return self._staged.run(lambda: self._inner._plan, q, paged_kv_cache, out, k_scale, v_scale)

    def append(key: Any, value: Any, rows: Any, positions: Any, kv: Any, indices: Any, indptr: Any, last: Any, layout: str) -> None:
        def store(key: Any, value: Any, rows: Any, positions: Any, keys: Any, values: Any, *tables: Any) -> None:
            interpreter.append_paged_kv_cache(key, value, rows, positions, (keys, values), *tables, layout)

        mode.kernel("append", store, (key, value, rows, positions, *kv, indices, indptr, last), {}, list(kv))

    states = torch.zeros(64, dtype=torch.uint8, device=CUDA)
    """What the thread blocks of `top_k` share, in memory that lives as long as the process."""

    def top_k(input: torch.Tensor, k: int, **modes: Any) -> Any:
        return mode.kernel("top_k", lambda input, _: interpreter.top_k(input, k, **modes), (input, states), {}, [states])

    def top_p(probs: torch.Tensor, top_p: torch.Tensor, **modes: Any) -> Any:
        return mode.kernel("top_p", lambda *parts: interpreter.top_p_renorm_probs(*parts, **modes), (probs, top_p), {})

    def quantize_append(query: Any, key: Any, _: Any, __: Any, value: Any, *tables: Any, **settings: Any) -> None:
        angles, zeros, pages, *paging = tables

        def store(query: Any, key: Any, value: Any, angles: Any, zeros: Any, keys: Any, values: Any, *paging: Any) -> None:
            interpreter.rope_quantize_fp8_append_paged_kv_cache(
                query, key, None, None, value, angles, zeros, (keys, values), *paging, **settings
            )

        mode.kernel("quantize and append", store, (query, key, value, angles, zeros, *pages, *paging), {}, list(pages))

    return SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        append_paged_kv_cache=append,
        top_k=top_k,
        top_p_renorm_probs=top_p,
        rope_quantize_fp8_append_paged_kv_cache=quantize_append,
    )


def _inner(part: torch.Tensor) -> torch.Tensor:
    return part.inner if isinstance(part, DeviceTensor) else part
