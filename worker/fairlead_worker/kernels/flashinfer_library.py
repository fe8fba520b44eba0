"""Types for the part of FlashInfer that the worker uses, and its import. `test_flashinfer_library.py` binds our calls to the real one.

Checked against flashinfer-python 0.7.2.post1.
"""

import importlib
import logging
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, Protocol, cast

import torch

LATENT, ROTATED = 512, 64
"""Sizes of latents for which kernels are compiled: those of DeepSeek's family. The store knows no others."""
HEAD_DIMS = (64, 128, 256)
"""Head sizes that all kernels used here support (`DISPATCH_HEAD_DIM`; some of them also support 512)."""
LAYOUT = "NHD"
"""Pages as [page_size, kv_heads, dim].

A token's heads are side by side, as the projections produce them, so storing KV is one contiguous write per token. It is also the
reference backend's layout, so layers that FlashInfer does not support use the same pages. HND is only for kernels of Blackwell
(trtllm-gen)."""

logger = logging.getLogger(__name__)
KV = tuple[torch.Tensor, torch.Tensor]


class PrefillWrapper(Protocol):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`: any number of queries per row."""

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
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool,
    ) -> None: ...

    def run(
        self, q: torch.Tensor, paged_kv_cache: KV, *, out: torch.Tensor, k_scale: float | None, v_scale: float | None
    ) -> torch.Tensor: ...


class DecodeWrapper(Protocol):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`: one query per row."""

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
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(self, q: torch.Tensor, paged_kv_cache: KV, *, out: torch.Tensor, k_scale: float | None, v_scale: float | None) -> torch.Tensor:
        """Attend with keys times `k_scale` (None: 1), and multiply the output by `v_scale`, which is a kernel of its own unless None."""
        ...


class LatentWrapper(Protocol):
    """`flashinfer.mla.BatchMLAPagedAttentionWrapper`: any number of queries per row, over latents."""

    def plan(
        self,
        *,
        metadata: Any,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Attend with queries [T, heads, latent + rotated] to pages [pages, page_size, latent + rotated]."""
        ...


class LatentMetadata(Protocol):
    """`flashinfer.mla.MLAPlanMetadata`."""

    def csr(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor) -> object: ...


class Library(Protocol):
    """FlashInfer's functions, as `library` finds them."""

    @property
    def MLAPlanMetadata(self) -> LatentMetadata: ...

    def BatchMLAPagedAttentionWrapper(
        self,
        float_workspace_buffer: torch.Tensor,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
    ) -> LatentWrapper:
        """As for decodes, with `use_cuda_graph`."""
        ...

    def append_paged_mla_kv_cache(
        self,
        append_ckv: torch.Tensor,
        append_kpe: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor,
    ) -> None:
        """Store each token's latent, [T, latent], and the rotated part of its key where the page tables say."""
        ...

    def BatchPrefillWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
    ) -> PrefillWrapper:
        """As for decodes, with `use_cuda_graph`; the number of queries is at most that of the first plan."""
        ...

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        use_tensor_cores: bool,
        backend: str,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> DecodeWrapper:
        """With `use_cuda_graph`, `plan` accepts a single batch size and writes the page tables into these buffers, which a graph reads."""
        ...

    def append_paged_kv_cache(
        self,
        append_key: torch.Tensor,
        append_value: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        paged_kv_cache: KV,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        kv_layout: str,
    ) -> None:
        """Store each token's KV, [T, kv_heads, dim], where the page tables say."""
        ...

    def rope_quantize_fp8_append_paged_kv_cache(
        self,
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
    ) -> object:
        """Turn keys by the angles of `cos_sin_cache` at `pos_ids`, multiply keys and values by `quant_scale_kv`, round and store them."""
        ...


MODULES = ("flashinfer", "flashinfer.rope", "flashinfer.mla")
"""The package exports all that is used here but the store in float8 and the metadata of latents."""


class Modules:
    """Several modules as one: a name is that of the first module that has it."""

    def __init__(self, modules: Sequence[ModuleType]) -> None:
        self._modules = modules

    def __getattr__(self, name: str) -> Any:
        if name == "_modules":  # of a copy that is being made
            raise AttributeError(name)
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"FlashInfer has no {name} in {', '.join(module.__name__ for module in self._modules)}")


@cache
def library() -> Library | None:
    """Return FlashInfer; None, with the reason in the log, if it is not installed or does not import."""
    try:
        return cast(Library, Modules([importlib.import_module(name) for name in MODULES]))
    except Exception as error:  # besides ImportError: a library that does not find its CUDA raises other exceptions
        logger.warning("FlashInfer is not available, so attention uses the slow `reference`: %s (install fairlead[gpu])", error)
        return None
