"""Types for the part of FlashInfer that fused layers use. `test_library.py` binds our calls to the real one.

Checked against flashinfer-python 0.7.2.post1. All functions take 16-bit numbers and sum in float32.
"""

from typing import Protocol, cast

import torch

from fairlead_worker.kernels import flashinfer_library

DTYPES = (torch.bfloat16, torch.float16)


class Library(Protocol):
    """The module `flashinfer`."""

    def rmsnorm(self, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return input / rms(input) * weight; input [T, width] or [T, heads, width]."""
        ...

    def gemma_rmsnorm(self, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return input / rms(input) * (weight + 1); input [T, width]."""
        ...

    def fused_add_rmsnorm(self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Add input to residual in place and set input = residual / rms(residual) * weight; both [T, width]."""
        ...

    def gemma_fused_add_rmsnorm(self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """As `fused_add_rmsnorm`, with weight + 1."""
        ...

    def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        """Return silu of the first half times the second: [..., 2 * width] -> [..., width]."""
        ...

    def gelu_and_mul(self, input: torch.Tensor) -> torch.Tensor: ...

    def gelu_tanh_and_mul(self, input: torch.Tensor) -> torch.Tensor: ...

    def apply_rope_with_cos_sin_cache_inplace(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor
    ) -> None:
        """Rotate query and key [T, heads * head_size] at positions [T], in place.

        cos_sin_cache [positions, rotated dimensions] float32: cosines, then sines.
        """
        ...


def library() -> Library | None:
    """Return the same module as attention uses; None, with the reason in the log, if it is not installed or does not import."""
    return cast(Library | None, flashinfer_library.library())
