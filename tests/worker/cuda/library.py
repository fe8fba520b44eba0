"""FlashInfer on the modelled device: what its kernels and plans read and write, and on which stream.

Like the library (0.7.2), each wrapper stages its schedule in pinned memory of its own, copies it to its device workspace by one
asynchronous copy on the current stream, and gives no sign when that copy is complete.
"""

from types import SimpleNamespace
from typing import Any

import torch
from bench.gpu import interpreter
from tests.worker.cuda.tensors import DeviceMode, DeviceTensor

SCHEDULE = 64
"""Bytes of a schedule."""


def make_library(mode: DeviceMode) -> Any:
    """Return the part of FlashInfer that the worker uses."""

    class Wrapper:
        """A wrapper, with its schedule in pinned memory and on the device. `buffers`: of a CUDA graph."""

        def __init__(self, inner: Any, workspace: torch.Tensor, layout: str, use_cuda_graph: bool, buffers: Any, **kind: Any) -> None:
            self._inner, self._workspace = inner(_inner(workspace), layout, **kind), workspace
            self._staging = torch.empty(SCHEDULE, dtype=torch.uint8, pin_memory=True)
            self._schedule = torch.empty(SCHEDULE, dtype=torch.uint8, device=workspace.device)
            self._buffers = list(buffers.values()) if use_cuda_graph else None
            self._tables: list[torch.Tensor] = []

        def plan(self, *arguments: Any, **settings: Any) -> None:
            parts = [part for part in arguments if isinstance(part, torch.Tensor)]
            self._inner.plan(*map(_inner, arguments), **settings)
            if self._buffers is None:
                self._tables = [part.to(self._workspace.device, non_blocking=True) for part in parts]
            else:
                for buffer, part in zip(self._buffers, parts, strict=True):
                    buffer[: len(part)].copy_(part, non_blocking=True)
                self._tables = self._buffers
            self._staging.fill_(1)
            self._schedule.copy_(self._staging, non_blocking=True)

        def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor, k_scale: Any, v_scale: Any) -> torch.Tensor:
            def attend(q: Any, keys: Any, values: Any, out: Any, *read: Any) -> None:
                self._inner._plan.run(q, (keys, values), out, k_scale, v_scale)

            read = (self._schedule, self._workspace, *self._tables)
            mode.kernel("attention", attend, (q, *paged_kv_cache, out, *read), {}, [out, self._workspace])
            return out

    def prefill(workspace: torch.Tensor, layout: str, *, backend: str, use_cuda_graph: bool = False, **buffers: Any) -> Wrapper:
        inner = interpreter.BatchPrefillWithPagedKVCacheWrapper
        return Wrapper(inner, workspace, layout, use_cuda_graph, buffers, backend=backend)

    def decode(workspace: torch.Tensor, layout: str, *, use_cuda_graph: bool = False, **named: Any) -> Wrapper:
        kind = {name: named.pop(name) for name in ("use_tensor_cores", "backend")}
        return Wrapper(interpreter.BatchDecodeWithPagedKVCacheWrapper, workspace, layout, use_cuda_graph, named, **kind)

    def append(key: Any, value: Any, rows: Any, positions: Any, kv: Any, indices: Any, indptr: Any, last: Any, layout: str) -> None:
        def store(key: Any, value: Any, rows: Any, positions: Any, keys: Any, values: Any, *tables: Any) -> None:
            interpreter.append_paged_kv_cache(key, value, rows, positions, (keys, values), *tables, layout)

        mode.kernel("append", store, (key, value, rows, positions, *kv, indices, indptr, last), {}, list(kv))

    def choose_tokens(logits: torch.Tensor, *parts: torch.Tensor) -> Any:
        return mode.kernel("choose_tokens", interpreter.choose_tokens, (logits, *parts), {}, [logits])  # it edits logits and restores them

    def quantize_append(query: Any, key: Any, _: Any, __: Any, value: Any, *tables: Any, **settings: Any) -> None:
        angles, zeros, pages, *paging = tables

        def store(query: Any, key: Any, value: Any, angles: Any, zeros: Any, keys: Any, values: Any, *paging: Any) -> None:
            interpreter.rope_quantize_fp8_append_paged_kv_cache(
                query, key, None, None, value, angles, zeros, (keys, values), *paging, **settings
            )

        mode.kernel("quantize and append", store, (query, key, value, angles, zeros, *pages, *paging), {}, list(pages))

    return SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=prefill,
        BatchDecodeWithPagedKVCacheWrapper=decode,
        append_paged_kv_cache=append,
        choose_tokens=choose_tokens,
        rope_quantize_fp8_append_paged_kv_cache=quantize_append,
    )


def _inner(part: Any) -> Any:
    return part.inner if isinstance(part, DeviceTensor) else part
