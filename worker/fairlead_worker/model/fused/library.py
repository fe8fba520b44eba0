"""What fused layers use of FlashInfer, as a type. `test_library.py` binds our calls to the real one.

Checked against flashinfer-python 0.7.2.post1. All of it is for 16-bit numbers, whose sums are in float32.
"""

from typing import Protocol, cast

import torch

from fairlead_worker.kernels import flashinfer_library

DTYPES = (torch.bfloat16, torch.float16)


class Library(Protocol):
    """The module `flashinfer`."""

    def rmsnorm(self, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, width] or [T, heads, width]: input / rms(input) * weight."""
        ...

    def gemma_rmsnorm(self, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, width]: input / rms(input) * (weight + 1)."""
        ...

    def fused_add_rmsnorm(self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """[T, width] both: residual += input, and input = residual / rms(residual) * weight, in place."""
        ...

    def gemma_fused_add_rmsnorm(self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """The same with weight + 1."""
        ...

    def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        """[..., 2 * width] -> [..., width]: silu of the first half times the second."""
        ...

    def gelu_and_mul(self, input: torch.Tensor) -> torch.Tensor: ...

    def gelu_tanh_and_mul(self, input: torch.Tensor) -> torch.Tensor: ...

    def apply_rope_with_cos_sin_cache_inplace(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor
    ) -> None:
        """positions [T], query and key [T, heads * head_size], cache [positions, turned] float32: cosines, then sines. In place."""
        ...


def library() -> Library | None:
    """The same module as attention uses; None, with the reason in the log, where it is not installed or does not import."""
    return cast(Library | None, flashinfer_library.library())
