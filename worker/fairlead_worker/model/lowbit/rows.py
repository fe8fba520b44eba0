"""Rounding of activations to float8 with a scale for each token, or for each 128 of its numbers, alone or in the kernel that computes them.

FlashInfer 0.7 rounds norms with a fixed scale, or in blocks that only DeepGEMM reads, and torchao's rounding takes 9 kernels. So three
kernels of ours, in Triton, round where the numbers are: after a sum and its norm, after a gated activation, and alone.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest float8 number."""
LEAST = 1e-12
"""The smallest scale: a token of zeros gives zeros, not 0 / 0."""
GROUP = 128
"""Numbers that share a scale in blocks, as DeepSeek-V3 has them (arXiv 2412.19437, 3.3.2)."""
ROWS = 4
"""cuBLAS takes scales of blocks for multiples of so many rows."""
Activation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu_and_mul": functional.silu,
    "gelu_tanh_and_mul": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_and_mul": functional.gelu,
}
"""FlashInfer's functions, and the activation of the gate in each."""


class Rounded(NamedTuple):
    """Activations in float8."""

    values: torch.Tensor
    """[T, width] float8; in blocks T is a multiple of `ROWS`, and the content of the added rows is undefined."""
    scale: torch.Tensor
    """float32 [T, 1], or [T, width / GROUP] with the rows side by side in memory."""
    shape: tuple[int, ...]
    """[..., width], of the activations."""


class Rounder(Protocol):
    """Rounds activations, each token by its largest number, or each block of a token by the largest one in it."""

    fuses: bool
    """Whether `add_norm` and `gated` can be called."""

    def round(self, inputs: torch.Tensor) -> Rounded:
        """Round [..., width]."""
        ...

    def add_norm(self, update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> Rounded:
        """As FlashInfer's `fused_add_rmsnorm`: residual [T, width] becomes the sum, update its norm, which is also returned rounded."""
        ...

    def gated(self, both: torch.Tensor, activation: str) -> Rounded:
        """Round the activation of the first half times the second: [..., 2 * width] -> [..., width]. activation: of `ACTIVATIONS`."""
        ...


class TorchRounder:
    """Four kernels of torch for each rounding."""

    fuses = False

    def __init__(self, blocks: bool = False) -> None:
        self._blocks = blocks

    def round(self, inputs: torch.Tensor) -> Rounded:
        rows = inputs.reshape(-1, inputs.shape[-1])
        if self._blocks:
            rows = functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        count = rows.shape[1] // GROUP if self._blocks else 1
        groups = rows.view(len(rows), count, rows.shape[1] // count)
        largest = torch.linalg.vector_norm(groups, float("inf"), 2, keepdim=True, dtype=torch.float32)
        scale = torch.add(LEAST, largest, alpha=1 / LARGEST)
        values = (groups / scale).to(FLOAT8).view(rows.shape)
        return Rounded(values, scale[:, :, 0].t().contiguous().t(), tuple(inputs.shape))

    def add_norm(self, update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> Rounded:
        raise NotImplementedError

    def gated(self, both: torch.Tensor, activation: str) -> Rounded:
        raise NotImplementedError


def dequantized(rounded: Rounded) -> torch.Tensor:
    """Return [T, width] float32."""
    count = rounded.values.shape[0] if rounded.scale.shape[1] == 1 else torch.Size(rounded.shape[:-1]).numel()
    values = rounded.values.float().view(*rounded.scale.shape, -1) * rounded.scale[:, :, None]
    return values.flatten(1)[:count]


def attach(tensor: torch.Tensor, rounded: Rounded) -> torch.Tensor:
    """Keep the rounded form beside `tensor`, for layers that read this very tensor."""
    tensor.rounded = rounded  # type: ignore[attr-defined]  # torch allows attributes of one's own
    return tensor


def attached(tensor: torch.Tensor) -> Rounded | None:
    """Return the rounded form of `tensor`, if it was computed already."""
    return getattr(tensor, "rounded", None)
