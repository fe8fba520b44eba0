"""FlashInfer's wrappers, and what their plans are given. A wrapper keeps the schedule of its latest plan, so each key has its own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.flashinfer_latents import make_latent_wrapper
from fairlead_worker.kernels.flashinfer_library import LAYOUT, DecodeWrapper, LatentWrapper, Library, PrefillWrapper
from fairlead_worker.kernels.paging import Paging, Tiles

TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which decoding uses the tensor cores (mini-sglang's choice)."""

Key = tuple[int, LayerSpec]
"""What one plan serves: a group of layers, which has page tables of its own, and a kind of layer."""
AnyWrapper = PrefillWrapper | DecodeWrapper | LatentWrapper
GraphWrappers = Mapping[Key, AnyWrapper]
"""Those of a graph: all for prefills, or all for decodes."""


@dataclass(frozen=True, slots=True)
class Wrappers:
    """The wrappers of one key."""

    prefill: PrefillWrapper
    decode: DecodeWrapper
    hopper: PrefillWrapper | None
    """Prefills by fa3; None: it does not run here."""


@dataclass(frozen=True, slots=True)
class LatentWrappers:
    """The wrappers of one key whose layers have latents."""

    prefill: LatentWrapper
    decode: LatentWrapper


@dataclass(frozen=True, slots=True)
class StepPart:
    """Rows of a step that one plan covers, for each key."""

    tokens: slice
    wrappers: dict[Key, AnyWrapper]
    tiles: dict[Key, Tiles]
    """Of kinds whose queries are padded."""


def uses_tensor_cores(kind: LayerSpec, spec: KVSpec) -> bool:
    """Return whether decodes use the kernels of prefills. With float8 all do, as in SGLang: these widen it faster."""
    return spec.scales is not None or kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP


def plan_prefill(kind: LayerSpec, spec: KVSpec, wrapper: PrefillWrapper, paging: Paging, disable_split_kv: bool) -> None:
    """Plan rows of any number of queries."""
    wrapper.plan(
        paging.query_indptr,
        paging.page_indptr,
        paging.page_indices,
        paging.last_page_len,
        kind.heads,
        kind.kv_heads,
        kind.key_dim,
        spec.page_size,
        causal=True,
        sm_scale=kind.scaling,
        window_left=_to_the_left(kind),
        logits_soft_cap=kind.softcap or 0.0,
        q_data_type=spec.dtype,
        kv_data_type=spec.kv_dtype,
        disable_split_kv=disable_split_kv,
    )


def plan_decodes(kind: LayerSpec, spec: KVSpec, wrapper: DecodeWrapper, paging: Paging) -> None:
    """Plan rows of one query."""
    wrapper.plan(
        paging.page_indptr,
        paging.page_indices,
        paging.last_page_len,
        kind.heads,
        kind.kv_heads,
        kind.key_dim,
        spec.page_size,
        sm_scale=kind.scaling,
        window_left=_to_the_left(kind),
        logits_soft_cap=kind.softcap or 0.0,
        q_data_type=spec.dtype,
        kv_data_type=spec.kv_dtype,
    )


def make_graph_wrappers(library: Library, workspace: Tensor, keys: Iterable[Key], spec: KVSpec, paging: Paging) -> GraphWrappers:
    """Make the wrappers of a graph, whose plans write the page tables into the buffers of `paging`."""
    each = paging.each
    return {(group, kind): _make_graph_wrapper(library, workspace, kind, spec, each[group]) for group, kind in keys}


def _make_graph_wrapper(library: Library, workspace: Tensor, kind: LayerSpec, spec: KVSpec, paging: Paging) -> AnyWrapper:
    if kind.value_in_key:
        return make_latent_wrapper(library, workspace, "fa2", paging)
    if not paging.single:
        return library.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            LAYOUT,
            backend="fa2",
            use_cuda_graph=True,
            qo_indptr_buf=paging.query_indptr,
            paged_kv_indptr_buf=paging.page_indptr,
            paged_kv_indices_buf=paging.page_indices,
            paged_kv_last_page_len_buf=paging.last_page_len,
        )
    return library.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        LAYOUT,
        use_tensor_cores=uses_tensor_cores(kind, spec),
        backend="fa2",
        use_cuda_graph=True,
        paged_kv_indptr_buffer=paging.page_indptr,
        paged_kv_indices_buffer=paging.page_indices,
        paged_kv_last_page_len_buffer=paging.last_page_len,
    )


def _to_the_left(kind: LayerSpec) -> int:
    """Return the number of keys that a query sees before its own; -1: all."""
    return -1 if kind.window is None else kind.window - 1
