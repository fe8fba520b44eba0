"""What FlashInfer's kernels support."""

import torch

from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.kernels.flashinfer_latents import unsupported_latents
from fairlead_worker.kernels.flashinfer_library import HEAD_DIMS

DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of queries and KV: the tensor cores multiply 16-bit numbers."""


def unsupported(layer: LayerSpec, dtype: torch.dtype, is_float8: bool = False) -> str:
    """Return why FlashInfer does not support `layer`; empty if it does. `is_float8`: whether KV is stored so."""
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} (its kernels are for float16 and bfloat16)"
    if layer.value_in_key:
        return unsupported_latents(layer, is_float8)
    if layer.key_dim != layer.value_dim:
        return f"keys of {layer.key_dim} with values of {layer.value_dim}"
    if layer.key_dim not in HEAD_DIMS:
        return f"heads of {layer.key_dim} (its kernels are for {', '.join(map(str, HEAD_DIMS))})"
    if layer.sinks is not None:
        return "attention sinks"
    if layer.chunk is not None:
        return "chunked attention"
    if layer.heads % layer.kv_heads:
        return f"{layer.heads} heads on {layer.kv_heads}"
    return ""
