"""Backend for NVIDIA GPUs: FlashInfer's paged kernels, planned once a step for each layer kind and run once a layer.

A decode-only step uses the decode wrapper. Any other step, including decodes beside chunks, is one plan of the prefill wrapper: its
queries are ragged ("prefill/append" in FlashInfer's words), and a decode is an append of one token. Splitting a mixed step in two would
add a launch per layer, and a decode's bits would depend on the batch.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep
from fairlead_worker.kernels.flashinfer_library import LAYOUT, DecodeWrapper, Library, PrefillWrapper, library, unsupported
from fairlead_worker.kernels.float8 import Float8Store, round_to_float8
from fairlead_worker.kernels.paging import Paging, Tiles, pad_to_tile, pin, plan_pages
from fairlead_worker.kernels.reference import ReferenceBackend, ReferenceStep
from fairlead_worker.kernels.transfer import to_device

TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which decoding uses the tensor cores (mini-sglang's choice)."""
LEAST_WORKSPACE = 128 << 20
"""FlashInfer's own recommendation."""
TILE = 128
"""Most queries of a thread block, times the query heads per KV head."""
LARGEST_TILE_FROM = 64
"""FlashInfer takes its largest tile (128; 64 for heads of 256) if rows have more such queries on average (`FA2DetermineCtaTileQ`)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wrappers:
    """The wrappers of one layer kind. Each keeps the schedule of its latest plan, so layer kinds cannot share them."""

    prefill: PrefillWrapper
    decode: DecodeWrapper


class Fence(Protocol):
    """Lets the host wait for the device."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class FlashInferBackend:
    """Keys and values as [pages, page_size, kv_heads, dim] for each layer. The reference backend serves unsupported layers."""

    name = "flashinfer"

    def __init__(self, spec: KVSpec, pages: int, flashinfer: Library | None = None, prefill_kernels: str = "fa2") -> None:
        """`flashinfer`: the library; None: the installed one. `prefill_kernels`: fa2, which decodes on tensor cores use too (one module to
        compile), or fa3, for Hopper only.

        Raises ValueError if the library is missing.
        """
        self.batch_invariant = False
        """Whether rows must have the same bits in any batch, decoded or prefilled. Then all of them use the prefill kernel with its largest
        tile, and no keys are split over thread blocks."""
        self.spec = spec
        self.pages = pages
        self._library = flashinfer or library()
        if self._library is None:
            raise ValueError("attention backend 'flashinfer' needs FlashInfer, which does not import here; install fairlead[gpu]")
        self._prefill_kernels = prefill_kernels
        self.padding_page = pages
        """A reserved page that padding rows read and write."""
        self._storage = ReferenceBackend(spec, pages + 1)
        self.keys, self.values = self._storage.keys, self._storage.values
        self._left_out: dict[LayerSpec, str] = {}
        self._wrappers: dict[LayerSpec, Wrappers] = {}
        self._workspace = torch.empty(0, dtype=torch.uint8, device=spec.device)
        self._float8: Float8Store | None = None
        """None: KV has 16 bits, or FlashInfer's kernel does not run here, and torch rounds."""
        if spec.scales is not None:
            self._float8 = Float8Store(self._library, LAYOUT, {kind.key_dim for kind in spec.layers}, spec.device)
        for kind in dict.fromkeys(spec.layers):
            if reason := unsupported(kind, spec.dtype):
                self.leave_out(kind, reason)
        self._make_wrappers()
        # A plan stages its schedule in pinned memory that the next plan overwrites. The next plan must wait until the copy completes.
        self._staged: Fence | None = torch.cuda.Event() if spec.device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch

    def _make_wrappers(self) -> None:
        kinds = [kind for kind in dict.fromkeys(self.spec.layers) if kind not in self._left_out]
        if not kinds:
            return
        # The decode wrapper requires zeros. One workspace serves all wrappers, because runs follow each other on one stream.
        size = workspace_bytes(kinds, processors(self.spec.device))
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.spec.device)
        assert self._library is not None
        for kind in kinds:
            self._wrappers[kind] = Wrappers(
                self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT, backend=self._prefill_kernels),
                self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, LAYOUT, use_tensor_cores=self._uses_tensor_cores(kind), backend="fa2"
                ),
            )

    def _uses_tensor_cores(self, kind: LayerSpec) -> bool:
        """Return whether decodes use the kernels of prefills. With float8 all do, as in SGLang: these widen it faster."""
        return self.spec.scales is not None or kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP

    def leave_out(self, kind: LayerSpec, reason: str) -> None:
        """Serve this layer kind by the reference backend from now on; logged once."""
        count = self.spec.layers.count(kind)
        logger.warning("FlashInfer does not support %s: %d of the layers use the slow `reference` attention", reason, count)
        self._left_out[kind] = reason
        self._wrappers.pop(kind, None)

    @property
    def kinds(self) -> list[LayerSpec]:
        """Return the layer kinds that FlashInfer serves, each with its own plan."""
        return list(self._wrappers)

    def plan(self, step: PackedStep) -> "FlashInferStep":
        paging = self._stage(plan_pages(step, self.spec.page_size))
        tiles = {kind: self._plan(kind, step, paging) for kind in self._wrappers}
        planned = FlashInferStep(self, step, paging, tiles)
        if self._staged is not None:
            self._staged.record()
        return planned

    def _stage(self, paging: Paging) -> Paging:
        """Copy `paging` to pinned memory and wait for the copy of the last plan, so that planning overlaps with earlier steps."""
        if self._staged is None:
            return paging
        paging = pin(paging)  # one copy for all layer kinds and the kernels that store KV; a long copy from pageable memory may block
        self._staged.synchronize()
        return paging

    def _plan(self, kind: LayerSpec, step: PackedStep, paging: Paging) -> Tiles | None:
        """Plan `kind`. Returns None if its queries are the step's tokens, one by one."""
        wrappers = self._wrappers[kind]
        if not self.batch_invariant:
            if paging.single:
                self._plan_decodes(kind, wrappers.decode, paging)
            else:
                self._plan_prefill(kind, wrappers.prefill, paging)
            return None
        least = LARGEST_TILE_FROM // (kind.heads // kind.kv_heads) + 1
        wider, tiles = pad_to_tile(paging, step, self.spec.page_size, least)
        self._plan_prefill(kind, wrappers.prefill, self._stage(wider))
        return Tiles(to_device(tiles.tokens, self.spec.device), to_device(tiles.places, self.spec.device))

    def _plan_prefill(self, kind: LayerSpec, wrapper: PrefillWrapper, paging: Paging) -> None:
        wrapper.plan(
            paging.query_indptr,
            paging.page_indptr,
            paging.page_indices,
            paging.last_page_len,
            kind.heads,
            kind.kv_heads,
            kind.key_dim,
            self.spec.page_size,
            causal=True,
            sm_scale=kind.scaling,
            window_left=_to_the_left(kind),
            logits_soft_cap=kind.softcap or 0.0,
            q_data_type=self.spec.dtype,
            kv_data_type=self.spec.kv_dtype,
            disable_split_kv=self.batch_invariant,
        )

    def _plan_decodes(self, kind: LayerSpec, wrapper: DecodeWrapper, paging: Paging) -> None:
        wrapper.plan(
            paging.page_indptr,
            paging.page_indices,
            paging.last_page_len,
            kind.heads,
            kind.kv_heads,
            kind.key_dim,
            self.spec.page_size,
            sm_scale=kind.scaling,
            window_left=_to_the_left(kind),
            logits_soft_cap=kind.softcap or 0.0,
            q_data_type=self.spec.dtype,
            kv_data_type=self.spec.kv_dtype,
        )

    def graph_wrappers(self, paging: Paging) -> dict[LayerSpec, DecodeWrapper]:
        """Make wrappers for a graph of decodes. Planning writes the page tables into the buffers of `paging`, sized for any plan."""
        assert self._library is not None
        kinds = [kind for kind in self.kinds if self._uses_tensor_cores(kind)]
        needed = graph_workspace_bytes(kinds, len(paging.last_page_len), processors(self.spec.device))
        if needed > len(self._workspace):  # sized for the largest graph, which comes first
            self._workspace = torch.zeros(needed, dtype=torch.uint8, device=self.spec.device)
        return {
            kind: self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                LAYOUT,
                use_tensor_cores=self._uses_tensor_cores(kind),
                backend="fa2",
                use_cuda_graph=True,
                paged_kv_indptr_buffer=paging.page_indptr,
                paged_kv_indices_buffer=paging.page_indices,
                paged_kv_last_page_len_buffer=paging.last_page_len,
            )
            for kind in self._wrappers
        }

    def plan_graph(self, wrappers: dict[LayerSpec, DecodeWrapper], paging: Paging) -> None:
        """Plan as `plan`, for the replay of a graph over `graph_wrappers`. `paging`: on the CPU, with as many rows as the graph."""
        paging = self._stage(paging)
        # FlashInfer copies host page indices into a graph's buffer only after all queued work, so they go to the device first.
        paging = replace(paging, page_indices=to_device(paging.page_indices, self.spec.device))
        for kind, wrapper in wrappers.items():
            self._plan_decodes(kind, wrapper, paging)
        if self._staged is not None:
            self._staged.record()

    def prepare(self) -> None:
        """Build or load every kernel and run it once. A layer kind that cannot be built falls back to the reference, with a warning. Writes
        page 0.
        """
        if self._float8 is not None and self.kinds:
            try:
                self._trial(self.kinds[0], 1, lambda step, kind, query, key, value: step.store(kind, key, value))
            except Exception as error:  # as below
                logger.warning("float8 KV is rounded by torch, with four more launches in a layer: %s", _reason(error))
                self._float8 = None
        for kind in self.kinds:
            for count in (1, 2):
                try:
                    self._trial(kind, count, FlashInferStep.attend)
                except Exception as error:  # whatever a compiler or a loader raises
                    self.leave_out(kind, f"heads of {kind.key_dim} here, as its kernel could not be built: {_reason(error)}")
                    break

    def _trial(self, kind: LayerSpec, count: int, run: "Callable[[FlashInferStep, int, Tensor, Tensor, Tensor], object]") -> None:
        """Call `run` with a planned step of `count` tokens on page 0, a layer of `kind`, queries, keys and values."""
        device, dtype = self.spec.device, self.spec.dtype
        pages = -(-count // self.spec.page_size)  # all of them page 0: there may be no other page
        step = PackedStep(
            tokens=torch.zeros(count, dtype=torch.int64, device=device),
            positions=torch.arange(count, device=device),
            slots=torch.arange(count, device=device) % self.spec.page_size,
            starts=[0],
            counts=[count],
            page_indptr=torch.tensor([0, pages], dtype=torch.int32),
            page_indices=torch.zeros(pages, dtype=torch.int32),
            sampling=torch.zeros(0, dtype=torch.int64, device=device),
        )
        shapes = (kind.heads, kind.kv_heads, kind.kv_heads)
        parts = [torch.zeros(count, heads, kind.key_dim, dtype=dtype, device=device) for heads in shapes]
        paging = plan_pages(step, self.spec.page_size)
        tiles = {kind: self._plan(kind, step, paging)}
        run(FlashInferStep(self, step, paging, tiles), self.spec.layers.index(kind), *parts)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return self._storage.read_pages(pages)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        self._storage.write_pages(pages, content)

    def wrapper(self, kind: LayerSpec, single: bool) -> PrefillWrapper | DecodeWrapper | None:
        """Return the wrapper of the latest plan for `kind`; None if the reference serves it."""
        found = self._wrappers.get(kind)
        if found is None:
            return None
        return found.decode if single and not self.batch_invariant else found.prefill

    def reference(self, step: PackedStep) -> ReferenceStep:
        """Plan `step` on the same pages by the reference backend."""
        return self._storage.plan(step)

    def store(self, layer: int, paging: Paging, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value [T, kv_heads, dim] into the pages; `paging` is on the device."""
        assert self._library is not None
        key, value = (dense(part.to(self.spec.dtype)) for part in (key, value))
        pages, scale = (self.keys[layer], self.values[layer]), self.spec.scale(layer)
        if self._float8 is not None:
            self._float8(key, value, paging, pages, scale)
            return
        if self.spec.scales is not None:
            key, value = (round_to_float8(part, scale) for part in (key, value))
        self._library.append_paged_kv_cache(
            key,
            value,
            paging.rows,
            paging.positions,
            pages,
            paging.page_indices,
            paging.page_indptr,
            paging.last_page_len,
            LAYOUT,
        )

    def run(self, wrapper: PrefillWrapper | DecodeWrapper, layer: int, queries: Tensor) -> Tensor:
        """Return the attention [T, heads, value_dim] of queries [T, heads, key_dim] by the latest plan of `wrapper`."""
        kind, scale = self.spec.layers[layer], self.spec.scale(layer)
        factor = None if scale == 1 else scale
        output = queries.new_empty(queries.shape[0], kind.heads, kind.value_dim)
        wrapper.run(dense(queries), (self.keys[layer], self.values[layer]), out=output, k_scale=factor, v_scale=factor)
        return output


class FlashInferStep:
    """One planned step, valid until the next plan of its backend."""

    def __init__(self, backend: FlashInferBackend, step: PackedStep, paging: Paging, tiles: dict[LayerSpec, Tiles | None]) -> None:
        self._backend = backend
        self._step = step
        self._tiles = tiles
        self._reference: ReferenceStep | None = None
        # The kernels that store KV read the page tables on the device, so they get device copies.
        device = backend.spec.device
        self._paging = Paging(
            query_indptr=paging.query_indptr,
            page_indptr=to_device(paging.page_indptr, device),
            page_indices=to_device(paging.page_indices, device),
            last_page_len=to_device(paging.last_page_len, device),
            rows=to_device(paging.rows, device),
            positions=to_device(paging.positions, device),
            single=paging.single,
            zeros=None if backend.spec.scales is None else torch.zeros(len(paging.rows), dtype=torch.int32, device=device),
        )

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the step's KV of `layer`."""
        self._backend.store(layer, self._paging, key, value)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend = self._backend
        kind = backend.spec.layers[layer]
        wrapper = backend.wrapper(kind, self._paging.single)
        if wrapper is None:
            self._reference = self._reference or backend.reference(self._step)
            return self._reference.attend(layer, query, key, value)
        self.store(layer, key, value)
        queries, tiles = query.to(backend.spec.dtype), self._tiles[kind]  # a model may rotate its queries in float32
        if tiles is not None:
            queries = queries[tiles.tokens]
        output = backend.run(wrapper, layer, queries)
        return (output if tiles is None else output[tiles.places]).to(query.dtype)


def workspace_bytes(kinds: list[LayerSpec], multiprocessors: int) -> int:
    """Return the bytes for partial results of rows whose keys are split over thread blocks.

    Two blocks per multiprocessor, a float32 output for each query of a tile (`PrefillPlan` in FlashInfer's scheduler.cuh; before 0.7
    without the division by the query heads per KV head).
    """
    most = max(2 * multiprocessors * TILE * (kind.value_dim + 1) * 4 * (kind.heads // kind.kv_heads) for kind in kinds)
    return max(LEAST_WORKSPACE, most)


def graph_workspace_bytes(kinds: list[LayerSpec], rows: int, multiprocessors: int) -> int:
    """Return the same for a graph of `rows` decodes of `kinds` on tensor cores.

    FlashInfer then counts every row's keys as split, whether they are or not (`PrefillPlan` with enable_cuda_graph, 0.7.2).
    """

    def needed(kind: LayerSpec) -> int:
        group = kind.heads // kind.kv_heads
        tile = next(tile for tile in (16, 64, TILE) if group <= tile or tile == TILE)
        blocks = max(2 * multiprocessors // kind.kv_heads, -(-rows * group // tile) + rows - 1)
        return kind.heads * -(-blocks * tile // group) * (kind.value_dim + 1) * 4 + 32  # 32 bytes align two arrays

    return max(map(needed, kinds), default=0)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for other devices."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def dense(part: torch.Tensor) -> torch.Tensor:
    """Return [T, heads, dim] with a contiguous last dimension. Rows and heads may be strided (views of stacked projections, transposes)."""
    return part if part.stride(-1) == 1 else part.contiguous()


def _to_the_left(kind: LayerSpec) -> int:
    """Return the number of keys that a query sees before its own; -1: all."""
    return -1 if kind.window is None else kind.window - 1


def _reason(error: Exception) -> str:
    """Return one line of `error`: the first error of a compiler's output, else the last line."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    reason = next((line for line in lines if "error:" in line), lines[-1])
    return f"{type(error).__name__}: {reason.strip()[:300]}"
