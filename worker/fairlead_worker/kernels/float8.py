"""Keys and values in float8 (e4m3), with one scale for each layer: numbers are divided by it, rounded, and stored in half the memory.

On a GPU the store is one kernel, as for 16 bits. FlashInfer's kernel for "rope, quantize, append" runs with angles of zero and without
queries, so it only rounds and stores; a rounding of its own would add four launches per layer. Keys and values have one scale, because
that kernel takes one. A larger scale than necessary costs no precision in a floating-point format, except for numbers near zero.
"""

from collections.abc import Iterable

import torch

from fairlead_worker.kernels.base import FLOAT8
from fairlead_worker.kernels.flashinfer_library import KV, Library
from fairlead_worker.kernels.paging import Paging

LARGEST = torch.finfo(FLOAT8).max


def round_to_float8(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    """Return numbers / scale in float8. Numbers out of its range become the largest: torch alone makes them NaN."""
    return (numbers.float() * (1 / scale)).clamp_(-LARGEST, LARGEST).to(FLOAT8)


class Float8Store:
    """Rounds and stores KV by one kernel of FlashInfer."""

    def __init__(self, library: Library, layout: str, head_dims: Iterable[int], device: torch.device) -> None:
        self._library, self._layout = library, layout
        self._angles = {dim: torch.tensor([[1.0] * (dim // 2) + [0.0] * (dim // 2)], device=device) for dim in head_dims}
        """Head size -> [1, head size] float32: a cosine of one and a sine of zero for each pair."""

    def __call__(self, key: torch.Tensor, value: torch.Tensor, paging: Paging, pages: KV, scale: float) -> None:
        """Store key and value [T, kv_heads, dim] in 16 bits. `paging`: on the device, with `zeros`."""
        tokens, _, dim = key.shape
        assert paging.zeros is not None, "pagings of float8 have them"
        self._library.rope_quantize_fp8_append_paged_kv_cache(
            key.new_empty(tokens, 0, dim),
            key,
            None,
            None,
            value,
            self._angles[dim],
            paging.zeros,
            pages,
            paging.page_indices,
            paging.page_indptr,
            paging.rows,
            paging.positions,
            quantize_dtype=FLOAT8,
            quant_scale_kv=1 / scale,
            page_size=pages[0].shape[1],
            kv_layout=self._layout,
        )
