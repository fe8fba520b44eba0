"""Backend for NVIDIA GPUs: FlashInfer's paged kernels, planned once a step for each layer kind and run once a layer.

A step that verifies drafted tokens uses the prefill wrapper (`verification`). Any other step has one or two parts, each with a plan: its
decodes use the decode wrapper, and its chunks the prefill wrapper (`StepPart`). In one plan of the prefill wrapper all rows would get one
tile size, by their average length (`PrefillSplitQOKVIndptr` in FlashInfer's scheduler.cuh, 0.7.2): 64 or 128 queries times heads, of which
a decode fills 4 or 8, while chunks get smaller tiles than they suit, and fa3 could serve neither. The second launch in a layer costs
microseconds. FlashInfer's POD wrappers compute both in one kernel, but `PODWithPagedKVCacheWrapper` takes a prompt outside of pages, and
`BatchPODWithPagedKVCacheWrapper` no soft cap and only fa2.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor

from fairlead_worker.kernels import hopper
from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep, StepContext
from fairlead_worker.kernels.flashinfer_latents import fits, make_latent_wrapper, plan_latents, store_latents
from fairlead_worker.kernels.flashinfer_library import LAYOUT, DecodeWrapper, LatentWrapper, Library, PrefillWrapper, library
from fairlead_worker.kernels.flashinfer_support import unsupported
from fairlead_worker.kernels.flashinfer_trial import build_fa3, build_kind, build_store
from fairlead_worker.kernels.flashinfer_wrappers import (
    AnyWrapper,
    GraphWrappers,
    Key,
    LatentWrappers,
    StepPart,
    Wrappers,
    make_graph_wrappers,
    plan_decodes,
    plan_prefill,
    uses_tensor_cores,
)
from fairlead_worker.kernels.float8 import Float8Store, round_to_float8
from fairlead_worker.kernels.paging import Paging, Tiles, pad_to_tile, pin, plan_pages, select_rows
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.kernels.verification import join_rows
from fairlead_worker.kernels.workspace import graph_workspace_bytes, processors, workspace_bytes

LARGEST_TILE_FROM = 64
"""FlashInfer takes its largest tile (128; 64 for heads of 256) if rows have more such queries on average (`FA2DetermineCtaTileQ`)."""

logger = logging.getLogger(__name__)


class Fence(Protocol):
    """Lets the host wait for the device."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class FlashInferBackend:
    """Keys and values as [pages, page_size, kv_heads, dim] for each layer. The reference backend serves unsupported layers."""

    name = "flashinfer"

    def __init__(self, spec: KVSpec, pages: int, flashinfer: Library | None = None, prefill_kernels: str = "auto") -> None:
        """`flashinfer`: the library; None: the installed one. `prefill_kernels`: fa2, which also decodes on tensor cores; fa3, for Hopper
        only; auto: fa3 for the steps that it suits, where it runs (`hopper`).

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
        self.keys_of = [*zip(spec.groups or (0,) * len(spec.layers), spec.layers, strict=True)]
        """The key of each layer."""
        self._wrappers: dict[Key, Wrappers | LatentWrappers] = {}
        self._workspace = torch.empty(0, dtype=torch.uint8, device=spec.device)
        self._float8: Float8Store | None = None
        """None: KV has 16 bits, or FlashInfer's kernel does not run here, and torch rounds."""
        if spec.scales is not None:
            self._float8 = Float8Store(self._library, LAYOUT, {kind.key_dim for kind in spec.layers}, spec.device)
        for kind in dict.fromkeys(spec.layers):
            if reason := unsupported(kind, spec.dtype, spec.scales is not None):
                self.leave_out(kind, reason)
        self._make_wrappers()
        # A plan stages its schedule in pinned memory that the next plan overwrites. The next plan must wait until the copy completes.
        self._staged: Fence | None = torch.cuda.Event() if spec.device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch

    def _make_wrappers(self) -> None:
        keys = [key for key in dict.fromkeys(self.keys_of) if key[1] not in self._left_out]
        if not keys:
            return
        # The decode wrapper requires zeros. One workspace serves all wrappers, because runs follow each other on one stream.
        size = workspace_bytes([kind for _, kind in keys if not kind.value_in_key], processors(self.spec.device))
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.spec.device)
        assert self._library is not None
        prefill, decode = self._library.BatchPrefillWithPagedKVCacheWrapper, self._library.BatchDecodeWithPagedKVCacheWrapper
        auto = self._prefill_kernels == "auto"
        with_fa3 = auto and hopper.is_supported(self.spec.device, self.spec.scales is not None)
        for key in keys:
            if key[1].value_in_key:
                kernels = "fa2" if auto else self._prefill_kernels
                self._wrappers[key] = LatentWrappers(*(make_latent_wrapper(self._library, self._workspace, kernels) for _ in range(2)))
                continue
            self._wrappers[key] = Wrappers(
                prefill(self._workspace, LAYOUT, backend="fa2" if auto else self._prefill_kernels),
                decode(self._workspace, LAYOUT, use_tensor_cores=uses_tensor_cores(key[1], self.spec), backend="fa2"),
                prefill(self._workspace, LAYOUT, backend="fa3") if with_fa3 else None,
            )

    def leave_out(self, kind: LayerSpec, reason: str) -> None:
        """Serve this layer kind by the reference backend from now on; logged once."""
        count = self.spec.layers.count(kind)
        logger.warning("FlashInfer does not support %s: %d of the layers use the slow `reference` attention", reason, count)
        self._left_out[kind] = reason
        self._wrappers = {key: wrappers for key, wrappers in self._wrappers.items() if key[1] != kind}

    @property
    def kinds(self) -> list[LayerSpec]:
        """Return the layer kinds that FlashInfer serves."""
        return list(dict.fromkeys(kind for _, kind in self._wrappers))

    def plan(self, step: PackedStep) -> "FlashInferStep":
        return FlashInferStep(self, step, *self.plan_parts(step))

    def plan_parts(self, step: PackedStep) -> tuple[Paging, list[StepPart]]:
        """Plan the attention of `step`, without its store: return its page tables on the host, and its parts."""
        joined = None if self.batch_invariant else join_rows(step)
        paging = plan_pages(joined or step, self.spec.page_size)
        rows, decodes = len(paging.last_page_len), 0 if self.batch_invariant or joined else count_decodes(step.counts)
        bounds = [0, decodes, rows] if 0 < decodes < rows else [0, rows]
        whole, *selected = self._stage(paging, *(select_rows(paging, *rows) for rows in pairwise(bounds) if len(bounds) > 2))
        parts = [self._plan(step, part, begin) for part, begin in zip(selected or [whole], bounds, strict=False)]
        if self._staged is not None:
            self._staged.record()
        return whole, parts

    def _stage(self, *pagings: Paging) -> list[Paging]:
        """Copy `pagings` to pinned memory and wait for the copy of the last plan, so that planning overlaps with earlier steps."""
        if self._staged is None:
            return list(pagings)
        # One copy for all layer kinds and the kernels that store KV; a long copy from pageable memory may block.
        pinned = [pin(paging) for paging in pagings]
        self._staged.synchronize()
        return pinned

    def _plan(self, step: PackedStep, paging: Paging, first: int) -> StepPart:
        """Plan the rows of `paging`, which begin at row `first` of the step. The first part begins at token 0, and has one token a row."""
        part = StepPart(slice(first, first + len(paging.rows)), {}, {})
        each = paging.each
        for key in filter(lambda key: self._serves(key[1], step), self._wrappers):
            part.wrappers[key] = self._plan_key(key, step, each[key[0]], part)
        return part

    def _serves(self, kind: LayerSpec, step: PackedStep) -> bool:
        """Return whether FlashInfer serves layers of `kind` in this step. Keys of latents may be split, by the lengths of other rows."""
        return not kind.value_in_key or (not self.batch_invariant and fits(step, kind))

    def _plan_key(self, key: Key, step: PackedStep, paging: Paging, part: StepPart) -> AnyWrapper:
        """`paging`: of the key's group."""
        wrappers, (group, kind) = self._wrappers[key], key
        if isinstance(wrappers, LatentWrappers):
            wrapper = wrappers.decode if paging.single else wrappers.prefill
            assert self._library is not None
            plan_latents(kind, self.spec, self._library, wrapper, paging)
            return wrapper
        if self.batch_invariant:
            least = LARGEST_TILE_FROM // (kind.heads // kind.kv_heads) + 1
            wider, tiles = pad_to_tile(paging, step.of_groups()[group], self.spec.page_size, least)
            plan_prefill(kind, self.spec, wrappers.prefill, self._stage(wider)[0], disable_split_kv=True)
            part.tiles[key] = Tiles(to_device(tiles.tokens, self.spec.device), to_device(tiles.places, self.spec.device))
            return wrappers.prefill
        if paging.single:
            plan_decodes(kind, self.spec, wrappers.decode, paging)
            return wrappers.decode
        counts = paging.query_indptr.diff().tolist()
        suits = wrappers.hopper is not None and hopper.has_enough_tiles(kind, counts, processors(self.spec.device))
        chosen = wrappers.hopper if suits and wrappers.hopper is not None else wrappers.prefill
        plan_prefill(kind, self.spec, chosen, paging, disable_split_kv=False)
        return chosen

    def graph_wrappers(self, paging: Paging) -> GraphWrappers:
        """Make wrappers for a graph of decodes, or of joined rows if `paging` is not of single queries. Planning writes the page tables
        into the buffers of `paging`, sized for any plan.
        """
        assert self._library is not None
        kinds = [kind for kind in self.kinds if not kind.value_in_key and (uses_tensor_cores(kind, self.spec) or not paging.single)]
        needed = graph_workspace_bytes(kinds, len(paging.last_page_len), processors(self.spec.device))
        if needed > len(self._workspace):  # sized for the largest graph, which comes first
            self._workspace = torch.zeros(needed, dtype=torch.uint8, device=self.spec.device)
        return make_graph_wrappers(self._library, self._workspace, self._wrappers, self.spec, paging)

    def plan_graph(self, wrappers: GraphWrappers, paging: Paging) -> None:
        """Plan as `plan`, for the replay of a graph over `graph_wrappers`. `paging`: on the CPU, with as many rows as the graph."""
        (paging,) = self._stage(paging)
        # FlashInfer copies host page indices into a graph's buffer only after all queued work, so they go to the device first.
        device = self.spec.device
        each = [replace(part, page_indices=to_device(part.page_indices, device)) for part in paging.each]
        for (group, kind), wrapper in wrappers.items():
            if kind.value_in_key:
                assert self._library is not None
                plan_latents(kind, self.spec, self._library, cast(LatentWrapper, wrapper), each[group])
            elif paging.single:
                plan_decodes(kind, self.spec, cast(DecodeWrapper, wrapper), each[group])
            else:
                plan_prefill(kind, self.spec, cast(PrefillWrapper, wrapper), each[group], disable_split_kv=self.batch_invariant)
        if self._staged is not None:
            self._staged.record()

    def prepare(self) -> None:
        """Build or load every kernel and run it once. A layer kind that cannot be built falls back to the reference, with a warning. Writes
        page 0.
        """
        if self._float8 is not None and self.kinds and not build_store(self):
            self._float8 = None
        for kind in self.kinds:
            self._prepare_fa3(kind)
            build_kind(self, kind)

    def _prepare_fa3(self, kind: LayerSpec) -> None:
        """Build or load fa3's kernels for `kind` and run them once. Prefills use fa2, with a warning, if that fails."""
        every = {key: wrappers for key, wrappers in self._wrappers.items() if key[1] == kind}
        before = {key: wrappers for key, wrappers in every.items() if isinstance(wrappers, Wrappers)}
        if self.batch_invariant or not any(wrappers.hopper for wrappers in before.values()):
            return
        for key, wrappers in before.items():
            assert wrappers.hopper is not None
            self._wrappers[key] = replace(wrappers, prefill=wrappers.hopper, hopper=None)
        if build_fa3(self, kind):
            self._wrappers |= before
        else:
            self._wrappers |= {key: replace(wrappers, hopper=None) for key, wrappers in before.items()}

    def begin(self, step: PackedStep, kind: LayerSpec | None = None) -> "FlashInferStep":
        """Return a trial step, planned for layers of `kind`, or for none."""
        paging = plan_pages(step, self.spec.page_size)
        part = StepPart(slice(0, len(paging.rows)), {}, {})
        for key in (key for key in self._wrappers if key[1] == kind):
            part.wrappers[key] = self._plan_key(key, step, paging.each[key[0]], part)
        return FlashInferStep(self, step, paging, [part])

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return self._storage.read_pages(pages)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        self._storage.write_pages(pages, content)

    def reference(self, step: PackedStep) -> StepContext:
        """Plan `step` on the same pages by the reference backend."""
        return self._storage.plan(step)

    def store(self, layer: int, paging: Paging, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value [T, kv_heads, dim] into the pages; `paging` is on the device."""
        assert self._library is not None
        if self.spec.layers[layer].source is not None:
            return
        if self.spec.layers[layer].value_in_key:
            store_latents(self._library, paging, dense(key.to(self.spec.dtype)), self.keys[layer])
            return
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

    def run(self, wrapper: AnyWrapper, layer: int, queries: Tensor, output: Tensor) -> None:
        """Write the attention of queries [T, heads, key_dim] by the latest plan of `wrapper` into `output` [T, heads, value_dim]."""
        if self.spec.layers[layer].value_in_key:
            cast(LatentWrapper, wrapper).run(query=queries.contiguous(), kv_cache=self.keys[layer][:, :, 0], out=output)
            return
        wrapper = cast(PrefillWrapper | DecodeWrapper, wrapper)
        scale = self.spec.scale(layer)
        factor = None if scale == 1 else scale
        wrapper.run(dense(queries), (self.keys[layer], self.values[layer]), out=output, k_scale=factor, v_scale=factor)

    def run_parts(self, parts: Sequence[StepPart], layer: int, queries: Tensor, output: Tensor) -> None:
        """Do the same for each of `parts`, whose plan is the latest one. Tokens behind the last part's are left as they are."""
        for part in parts:
            self.run(part.wrappers[self.keys_of[layer]], layer, queries[part.tokens], output[part.tokens])

    def make_output(self, layer: int, queries: Tensor) -> Tensor:
        kind = self.spec.layers[layer]
        return queries.new_empty(queries.shape[0], kind.heads, kind.value_dim)


class FlashInferStep:
    """One planned step, valid until the next plan of its backend."""

    def __init__(self, backend: FlashInferBackend, step: PackedStep, paging: Paging, parts: Sequence[StepPart]) -> None:
        self._backend = backend
        self._step = step
        self._parts = parts
        self._reference: StepContext | None = None
        # The kernels that store KV read the page tables on the device, so they get device copies.
        device = backend.spec.device
        stored = Paging(
            query_indptr=paging.query_indptr,
            page_indptr=to_device(paging.page_indptr, device),
            page_indices=to_device(paging.page_indices, device),
            last_page_len=to_device(paging.last_page_len, device),
            rows=to_device(paging.rows, device),
            positions=to_device(paging.positions, device),
            single=paging.single,
            zeros=None if backend.spec.scales is None else torch.zeros(len(paging.rows), dtype=torch.int32, device=device),
            others=tuple(to_device(indices, device) for indices in paging.others),
        )
        self._pagings = stored.each

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the step's KV of `layer`."""
        self._backend.store(layer, self._pagings[self._backend.keys_of[layer][0]], key, value)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend = self._backend
        key_of = backend.keys_of[layer]
        if key_of not in self._parts[0].wrappers:
            self._reference = self._reference or backend.reference(self._step)
            return self._reference.attend(layer, query, key, value)
        self.store(layer, key, value)
        queries, tiles = query.to(backend.spec.dtype), self._parts[0].tiles.get(key_of)  # a model may rotate its queries in float32
        if tiles is not None:  # one part, whose tokens are not the queries
            queries = queries[tiles.tokens]
        output = backend.make_output(layer, queries)
        if tiles is not None:
            backend.run(self._parts[0].wrappers[key_of], layer, queries, output)
        else:
            backend.run_parts(self._parts, layer, queries, output)
        return (output if tiles is None else output[tiles.places]).to(query.dtype)


def count_decodes(counts: Sequence[int]) -> int:
    """Return the number of leading rows with one token: a step has its decodes before its chunks."""
    return next((row for row, count in enumerate(counts) if count > 1), len(counts))


def dense(part: torch.Tensor) -> torch.Tensor:
    """Return [T, heads, dim] with a contiguous last dimension. Rows and heads may be strided (views of stacked projections, transposes)."""
    return part if part.stride(-1) == 1 else part.contiguous()
