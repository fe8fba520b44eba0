"""Attention over latents (`model/layers/latent.py`) by FlashInfer's MLA kernels: all heads read one latent, whose beginning is the value.

One wrapper serves decodes and chunks. Its kernel computes tiles of queries times heads, and misses a key where a tile ends between the
heads of a token, so FlashInfer (0.7.2) refuses such plans: the number of heads must divide a tile.
"""

from torch import Tensor

from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep
from fairlead_worker.kernels.flashinfer_library import LATENT, ROTATED, LatentWrapper, Library
from fairlead_worker.kernels.paging import Paging

TILE = 64
"""Queries times heads of a thread block; a cluster of two has 128."""
MOST_TILES = 16_000
"""FlashInfer plans at most 16,384 parts: tiles, and one more for each processor where keys are split (`_FA_MAX_WORK_ITEMS`)."""


def unsupported_latents(layer: LayerSpec, is_float8: bool) -> str:
    """Return why FlashInfer does not support a layer whose values are in its keys; empty if it does."""
    if (layer.value_dim, layer.key_dim) != (LATENT, LATENT + ROTATED):
        return f"latents of {layer.value_dim} with {layer.key_dim - layer.value_dim} (its kernels are for {LATENT} with {ROTATED})"
    if 2 * TILE % layer.heads:
        return f"latents of {layer.heads} heads, which do not divide a tile of {2 * TILE}"
    return "latents in float8" if is_float8 else ""


def fits(step: PackedStep, kind: LayerSpec) -> bool:
    """Return whether one plan takes the step."""
    return sum(-(-count * kind.heads // TILE) for count in step.counts) <= MOST_TILES


def make_latent_wrapper(library: Library, workspace: Tensor, backend: str, buffers: Paging | None = None) -> LatentWrapper:
    """Make a wrapper. `buffers`: of a graph, into which plans write the page tables."""
    if buffers is None:
        return library.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    return library.BatchMLAPagedAttentionWrapper(
        workspace,
        backend=backend,
        use_cuda_graph=True,
        qo_indptr=buffers.query_indptr,
        kv_indptr=buffers.page_indptr,
        kv_indices=buffers.page_indices,
        kv_len_arr=buffers.lengths,
    )


def plan_latents(kind: LayerSpec, spec: KVSpec, library: Library, wrapper: LatentWrapper, paging: Paging) -> None:
    """Plan rows of any number of queries."""
    assert paging.lengths is not None, "pagings of steps have them"
    lengths = paging.lengths.pin_memory() if spec.device.type == "cuda" else paging.lengths
    wrapper.plan(
        metadata=library.MLAPlanMetadata.csr(paging.query_indptr, paging.page_indptr, paging.page_indices, lengths),
        num_heads=kind.heads,
        head_dim_ckv=LATENT,
        head_dim_kpe=ROTATED,
        page_size=spec.page_size,
        causal=True,
        sm_scale=kind.scaling,
        q_data_type=spec.dtype,
        kv_data_type=spec.kv_dtype,
    )


def store_latents(library: Library, paging: Paging, key: Tensor, pages: Tensor) -> None:
    """Store key [T, 1, dim] into pages [pages, page_size, 1, dim]. `paging`: on the device."""
    latent, rotated = key[:, 0, :LATENT], key[:, 0, LATENT:]
    stored, turned = pages[:, :, 0, :LATENT], pages[:, :, 0, LATENT:]
    library.append_paged_mla_kv_cache(
        latent, rotated, paging.rows, paging.positions, stored, turned, paging.page_indices, paging.page_indptr, paging.last_page_len
    )
