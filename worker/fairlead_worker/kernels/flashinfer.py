"""The backend for NVIDIA GPUs: FlashInfer's paged kernels, planned once a step for each kind of layer and run once a layer.

A step of decodes alone goes through the decode wrapper. Any other step, decodes beside chunks too, is one plan of the prefill wrapper: its
queries are ragged ("prefill/append" in FlashInfer's words), and a decode is an append of one token. Splitting a mixed step in two would add
a launch a layer, and give a decode other bits with and without company.
"""

import logging
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep
from fairlead_worker.kernels.flashinfer_library import LAYOUT, DecodeWrapper, Library, PrefillWrapper, library, unsupported
from fairlead_worker.kernels.paging import Paging, Tiles, pad_to_tile, pin, plan_pages
from fairlead_worker.kernels.reference import ReferenceBackend, ReferenceStep
from fairlead_worker.kernels.transfer import to_device

TENSOR_CORE_GROUP = 4
"""Query heads on one KV head from which on decoding uses the tensor cores (mini-sglang's choice)."""
LEAST_WORKSPACE = 128 << 20
"""FlashInfer's own recommendation."""
TILE = 128
"""Queries, times heads on a KV head, of a thread block at most."""
LARGEST_TILE_FROM = 64
"""FlashInfer takes its largest tile (128; 64 for heads of 256) where rows have more such queries on average (`FA2DetermineCtaTileQ`)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wrappers:
    """Of one kind of layer. Each keeps the schedule of its latest plan, so that kinds cannot share them."""

    prefill: PrefillWrapper
    decode: DecodeWrapper


class Fence(Protocol):
    """Orders the host behind the device."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class FlashInferBackend:
    """Keys and values as [pages, page_size, kv_heads, dim] for each layer: the reference's, which serves what FlashInfer does not."""

    name = "flashinfer"

    def __init__(self, spec: KVSpec, pages: int, flashinfer: Library | None = None, prefill_kernels: str = "fa2") -> None:
        """`flashinfer`: the library; None: as it is installed. `prefill_kernels`: fa2, which the decodes' tensor cores use too (one module
        to compile), or fa3, for Hopper alone. ValueError where the library is not there."""
        self.batch_invariant = False
        """Rows have the same bits in any company, decoded or prefilled: all of them by the prefill kernel with its largest tile, no keys
        split over thread blocks."""
        self.spec = spec
        self.pages = pages
        self._library = flashinfer or library()
        if self._library is None:
            raise ValueError("attention backend 'flashinfer' needs FlashInfer, which does not import here; install fairlead[gpu]")
        self._prefill_kernels = prefill_kernels
        self.padding_page = pages
        """Nobody's: where rows that fill up a batch write and read."""
        self._storage = ReferenceBackend(spec, pages + 1)
        self.keys, self.values = self._storage.keys, self._storage.values
        self._left_out: dict[LayerSpec, str] = {}
        self._wrappers: dict[LayerSpec, Wrappers] = {}
        self._workspace = torch.empty(0, dtype=torch.uint8, device=spec.device)
        for kind in dict.fromkeys(spec.layers):
            if reason := unsupported(kind, spec.dtype):
                self.leave_out(kind, reason)
        self._make_wrappers()
        # A plan stages its schedule in pinned memory that the next plan writes into: not before the copy of the last one is over.
        self._staged: Fence | None = torch.cuda.Event() if spec.device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch

    def _make_wrappers(self) -> None:
        kinds = [kind for kind in dict.fromkeys(self.spec.layers) if kind not in self._left_out]
        if not kinds:
            return
        # Zeros: the decode wrapper asks for them. One for all, as runs follow each other on one stream.
        size = workspace_bytes(kinds, processors(self.spec.device))
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.spec.device)
        assert self._library is not None
        for kind in kinds:
            self._wrappers[kind] = Wrappers(
                self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT, backend=self._prefill_kernels),
                self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, LAYOUT, use_tensor_cores=kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP, backend="fa2"
                ),
            )

    def leave_out(self, kind: LayerSpec, reason: str) -> None:
        """Layers of this kind are the reference's from now on; said once."""
        count = self.spec.layers.count(kind)
        logger.warning("FlashInfer does not do %s: `reference` attention, which is slow, for %d of the layers", reason, count)
        self._left_out[kind] = reason
        self._wrappers.pop(kind, None)

    @property
    def kinds(self) -> list[LayerSpec]:
        """Those of FlashInfer's, each with a plan of its own."""
        return list(self._wrappers)

    def plan(self, step: PackedStep) -> "FlashInferStep":
        paging = self._stage(plan_pages(step, self.spec.page_size))
        tiles = {kind: self._plan(kind, step, paging) for kind in self._wrappers}
        planned = FlashInferStep(self, step, paging, tiles)
        if self._staged is not None:
            self._staged.record()
        return planned

    def _stage(self, paging: Paging) -> Paging:
        """For planning while earlier steps run, once the copy of the last plan is over."""
        if self._staged is None:
            return paging
        paging = pin(paging)  # once for all kinds and for the kernels that store KV; a long copy from other memory may wait
        self._staged.synchronize()
        return paging

    def _plan(self, kind: LayerSpec, step: PackedStep, paging: Paging) -> Tiles | None:
        """Plans `kind`. None where its queries are the step's tokens, one by one."""
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
            kv_data_type=self.spec.dtype,
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
            kv_data_type=self.spec.dtype,
        )

    def graph_wrappers(self, paging: Paging) -> dict[LayerSpec, DecodeWrapper]:
        """For a graph of decodes: planning writes the page tables into the buffers of `paging`, which are as large as any plan needs."""
        assert self._library is not None
        needed = graph_workspace_bytes(self.kinds, len(paging.last_page_len), processors(self.spec.device))
        if needed > len(self._workspace):  # of the largest graph, which comes first; other wrappers keep theirs
            self._workspace = torch.zeros(needed, dtype=torch.uint8, device=self.spec.device)
        return {
            kind: self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                LAYOUT,
                use_tensor_cores=kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP,
                backend="fa2",
                use_cuda_graph=True,
                paged_kv_indptr_buffer=paging.page_indptr,
                paged_kv_indices_buffer=paging.page_indices,
                paged_kv_last_page_len_buffer=paging.last_page_len,
            )
            for kind in self._wrappers
        }

    def plan_graph(self, wrappers: dict[LayerSpec, DecodeWrapper], paging: Paging) -> None:
        """As `plan`, for the replay of a graph over `graph_wrappers`. `paging`: on the CPU, of as many rows as the graph has."""
        paging = self._stage(paging)
        # Into a graph's buffer FlashInfer copies page indices that are not on the device only after waiting for all work queued before.
        paging = replace(paging, page_indices=to_device(paging.page_indices, self.spec.device))
        for kind, wrapper in wrappers.items():
            self._plan_decodes(kind, wrapper, paging)
        if self._staged is not None:
            self._staged.record()

    def prepare(self) -> None:
        """Has every kernel built or loaded, and run once: what cannot be built here is the reference's, with a warning. Writes page 0."""
        for kind in self.kinds:
            for count in (1, 2):
                try:
                    self._try(kind, count)
                except Exception as error:  # whatever a compiler or a loader raises
                    self.leave_out(kind, f"heads of {kind.key_dim} here, as its kernel could not be built: {_reason(error)}")
                    break

    def _try(self, kind: LayerSpec, count: int) -> None:
        device, dtype = self.spec.device, self.spec.dtype
        pages = -(-count // self.spec.page_size)  # each of them page 0: there may be no other
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
        FlashInferStep(self, step, paging, tiles).attend(self.spec.layers.index(kind), *parts)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return self._storage.read_pages(pages)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        self._storage.write_pages(pages, content)

    def wrapper(self, kind: LayerSpec, single: bool) -> PrefillWrapper | DecodeWrapper | None:
        """That of the latest plan for `kind`; None where it is the reference's."""
        found = self._wrappers.get(kind)
        if found is None:
            return None
        return found.decode if single and not self.batch_invariant else found.prefill

    def reference(self, step: PackedStep) -> ReferenceStep:
        """`step` on the same pages by the reference."""
        return self._storage.plan(step)

    def store(self, layer: int, paging: Paging, key: torch.Tensor, value: torch.Tensor) -> None:
        """key and value [T, kv_heads, dim] into the pages; `paging` on the device."""
        assert self._library is not None
        self._library.append_paged_kv_cache(
            dense(key.to(self.spec.dtype)),
            dense(value.to(self.spec.dtype)),
            paging.rows,
            paging.positions,
            (self.keys[layer], self.values[layer]),
            paging.page_indices,
            paging.page_indptr,
            paging.last_page_len,
            LAYOUT,
        )


class FlashInferStep:
    """One step, planned: valid until the next plan of its backend."""

    def __init__(self, backend: FlashInferBackend, step: PackedStep, paging: Paging, tiles: dict[LayerSpec, Tiles | None]) -> None:
        self._backend = backend
        self._step = step
        self._tiles = tiles
        self._reference: ReferenceStep | None = None
        # The kernels that store KV read the page tables on the device, and so have copies of their own.
        device = backend.spec.device
        self._paging = Paging(
            query_indptr=paging.query_indptr,
            page_indptr=to_device(paging.page_indptr, device),
            page_indices=to_device(paging.page_indices, device),
            last_page_len=to_device(paging.last_page_len, device),
            rows=to_device(paging.rows, device),
            positions=to_device(paging.positions, device),
            single=paging.single,
        )

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend = self._backend
        kind = backend.spec.layers[layer]
        wrapper = backend.wrapper(kind, self._paging.single)
        if wrapper is None:
            self._reference = self._reference or backend.reference(self._step)
            return self._reference.attend(layer, query, key, value)
        backend.store(layer, self._paging, key, value)
        dtype = backend.spec.dtype  # a model may turn its queries in float32
        queries, tiles = query.to(dtype), self._tiles[kind]
        if tiles is not None:
            queries = queries[tiles.tokens]
        output = query.new_empty(queries.shape[0], kind.heads, kind.value_dim, dtype=dtype)
        wrapper.run(dense(queries), (backend.keys[layer], backend.values[layer]), out=output)
        return (output if tiles is None else output[tiles.places]).to(query.dtype)


def workspace_bytes(kinds: list[LayerSpec], multiprocessors: int) -> int:
    """Bytes for the partial results of rows whose keys are split over thread blocks: two blocks a multiprocessor, a float32 output for each
    query of a tile (`PrefillPlan` in FlashInfer's scheduler.cuh, before 0.7 without the division by the heads on a KV head)."""
    most = max(2 * multiprocessors * TILE * (kind.value_dim + 1) * 4 * (kind.heads // kind.kv_heads) for kind in kinds)
    return max(LEAST_WORKSPACE, most)


def graph_workspace_bytes(kinds: list[LayerSpec], rows: int, multiprocessors: int) -> int:
    """The same of a graph of `rows` decodes on tensor cores, for which every row's keys count as split, whether they are or not
    (`PrefillPlan` with enable_cuda_graph, 0.7.2). 0 where no kind uses these."""

    def needed(kind: LayerSpec) -> int:
        group = kind.heads // kind.kv_heads
        tile = next(tile for tile in (16, 64, TILE) if group <= tile or tile == TILE)
        blocks = max(2 * multiprocessors // kind.kv_heads, -(-rows * group // tile) + rows - 1)
        return kind.heads * -(-blocks * tile // group) * (kind.value_dim + 1) * 4 + 32  # and what aligns two arrays

    return max((needed(kind) for kind in kinds if kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP), default=0)


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 of anything else."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def dense(part: torch.Tensor) -> torch.Tensor:
    """[T, heads, dim] whose last dimension is contiguous: rows and heads may be strided (views of stacked projections, transposes)."""
    return part if part.stride(-1) == 1 else part.contiguous()


def _to_the_left(kind: LayerSpec) -> int:
    """Keys that a query sees beside its own; -1: all."""
    return -1 if kind.window is None else kind.window - 1


def _reason(error: Exception) -> str:
    """One line: of a compiler's output the first that tells an error, else the last."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    told = next((line for line in lines if "error:" in line), lines[-1])
    return f"{type(error).__name__}: {told.strip()[:300]}"
