"""Backend for NVIDIA GPUs: FlashInfer's paged kernels, planned once a step for each layer kind and run once a layer.

A decode-only step uses the decode wrapper. Any other step, including decodes beside chunks, is one plan of the prefill wrapper: its
queries are ragged ("prefill/append" in FlashInfer's words), and a decode is an append of one token. Splitting a mixed step in two would
add a launch per layer, and a decode's bits would depend on the batch.
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
                    self._workspace, LAYOUT, use_tensor_cores=kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP, backend="fa2"
                ),
            )

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
        """Make wrappers for a graph of decodes. Planning writes the page tables into the buffers of `paging`, sized for any plan."""
        assert self._library is not None
        needed = graph_workspace_bytes(self.kinds, len(paging.last_page_len), processors(self.spec.device))
        if needed > len(self._workspace):  # sized for the largest graph, which comes first
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
        for kind in self.kinds:
            for count in (1, 2):
                try:
                    self._try(kind, count)
                except Exception as error:  # whatever a compiler or a loader raises
                    self.leave_out(kind, f"heads of {kind.key_dim} here, as its kernel could not be built: {_reason(error)}")
                    break

    def _try(self, kind: LayerSpec, count: int) -> None:
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
        FlashInferStep(self, step, paging, tiles).attend(self.spec.layers.index(kind), *parts)
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
        )

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend = self._backend
        kind = backend.spec.layers[layer]
        wrapper = backend.wrapper(kind, self._paging.single)
        if wrapper is None:
            self._reference = self._reference or backend.reference(self._step)
            return self._reference.attend(layer, query, key, value)
        backend.store(layer, self._paging, key, value)
        dtype = backend.spec.dtype  # a model may rotate its queries in float32
        queries, tiles = query.to(dtype), self._tiles[kind]
        if tiles is not None:
            queries = queries[tiles.tokens]
        output = query.new_empty(queries.shape[0], kind.heads, kind.value_dim, dtype=dtype)
        wrapper.run(dense(queries), (backend.keys[layer], backend.values[layer]), out=output)
        return (output if tiles is None else output[tiles.places]).to(query.dtype)


def workspace_bytes(kinds: list[LayerSpec], multiprocessors: int) -> int:
    """Return the bytes for partial results of rows whose keys are split over thread blocks.

    Two blocks per multiprocessor, a float32 output for each query of a tile (`PrefillPlan` in FlashInfer's scheduler.cuh; before 0.7
    without the division by the query heads per KV head).
    """
    most = max(2 * multiprocessors * TILE * (kind.value_dim + 1) * 4 * (kind.heads // kind.kv_heads) for kind in kinds)
    return max(LEAST_WORKSPACE, most)


def graph_workspace_bytes(kinds: list[LayerSpec], rows: int, multiprocessors: int) -> int:
    """Return the same for a graph of `rows` decodes on tensor cores; 0 if no layer kind uses them.

    FlashInfer then counts every row's keys as split, whether they are or not (`PrefillPlan` with enable_cuda_graph, 0.7.2).
    """

    def needed(kind: LayerSpec) -> int:
        group = kind.heads // kind.kv_heads
        tile = next(tile for tile in (16, 64, TILE) if group <= tile or tile == TILE)
        blocks = max(2 * multiprocessors // kind.kv_heads, -(-rows * group // tile) + rows - 1)
        return kind.heads * -(-blocks * tile // group) * (kind.value_dim + 1) * 4 + 32  # 32 bytes align two arrays

    return max((needed(kind) for kind in kinds if kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP), default=0)


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
