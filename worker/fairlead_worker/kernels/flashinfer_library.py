"""What we use of FlashInfer, as a type, and how it is found. `test_flashinfer_library.py` binds our calls to the real one.

Checked against flashinfer-python 0.7.2.post1.
"""

import importlib
import logging
from functools import cache
from typing import Protocol, cast

import torch

from fairlead_worker.kernels.base import LayerSpec

HEAD_DIMS = (64, 128, 256)
"""That all kernels used here have (`DISPATCH_HEAD_DIM`; 512 is not in every one of them)."""
DTYPES = (torch.float16, torch.bfloat16)
"""Of queries and KV: the products are of the tensor cores, in 16 bits."""
LAYOUT = "NHD"
"""Pages as [page_size, kv_heads, dim]. A token's heads are side by side, as the projections leave them, so that storing KV is one
contiguous write a token; and it is the reference backend's own layout, so that layers which FlashInfer does not do are served from the
same pages. HND is for kernels of Blackwell alone (trtllm-gen)."""

logger = logging.getLogger(__name__)
KV = tuple[torch.Tensor, torch.Tensor]


class PrefillWrapper(Protocol):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`: any number of queries a row."""

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

    def run(self, q: torch.Tensor, paged_kv_cache: KV, *, out: torch.Tensor) -> torch.Tensor: ...


class DecodeWrapper(Protocol):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`: one query a row."""

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

    def run(self, q: torch.Tensor, paged_kv_cache: KV, *, out: torch.Tensor) -> torch.Tensor: ...


class Library(Protocol):
    """The module `flashinfer`."""

    def BatchPrefillWithPagedKVCacheWrapper(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, *, backend: str
    ) -> PrefillWrapper: ...

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
        """With `use_cuda_graph`, `plan` takes one batch size alone and writes the page tables into these buffers, for a graph to read."""
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


@cache
def library() -> Library | None:
    """FlashInfer; None, with the reason in the log, where it is not installed or does not import."""
    try:
        return cast(Library, importlib.import_module("flashinfer"))
    except Exception as error:  # besides ImportError: a library that does not find its CUDA raises what it likes
        logger.warning("FlashInfer is not there, attention is the slow `reference`: %s (install fairlead[gpu])", error)
        return None


def unsupported(layer: LayerSpec, dtype: torch.dtype) -> str:
    """Why FlashInfer does not do `layer`; empty where it does."""
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} (its kernels are for float16 and bfloat16)"
    if layer.key_dim != layer.value_dim:
        return f"keys of {layer.key_dim} with values of {layer.value_dim}"
    if layer.key_dim not in HEAD_DIMS:
        return f"heads of {layer.key_dim} (its kernels are for {', '.join(map(str, HEAD_DIMS))})"
    if layer.heads % layer.kv_heads:
        return f"{layer.heads} heads on {layer.kv_heads}"
    return ""
