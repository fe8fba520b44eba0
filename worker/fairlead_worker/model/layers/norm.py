"""Norms of decoders. Each takes the sum that it reads along: the residual and a sublayer's output (as in vLLM and nano-vllm)."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.model.fused.library import DTYPES, Library
from fairlead_worker.model.fused.sums import RankSum
from fairlead_worker.model.lowbit.rows import Rounder, attach


def mean_square(states: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squares, [..., 1] float32, of states [..., width]."""
    return states.float().square().mean(-1, keepdim=True)


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * (weight, weight + 1 as in Gemma, or 1), in float32 (Zhang and Sennrich 2019)."""

    kernels: Library | None = None
    """Computes 16 bits in one kernel, on a GPU."""
    rounder: Rounder | None = None
    """Also rounds the norm of a sum to float8, for layers that multiply float8."""
    sums: RankSum | None = None
    """Sums over the ranks what a sublayer leaves as this rank's part."""

    def __init__(self, width: int, eps: float, plus_one: bool = False, weight: bool = True) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.empty(width)) if weight else None
        self.width, self.eps, self.plus_one = width, eps, plus_one

    def forward(self, states: torch.Tensor, residual: torch.Tensor | None = None, mean: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of states [..., width], or of residual + states, where `residual` [T, width] becomes the sum.

        The residual may be in float32 with states of 16 bits. mean: of the squares [..., 1], if other ranks have a part of the width.
        """
        if mean is not None:
            return self._plain(states, mean)
        fast = self.kernels is not None and states.dtype in DTYPES and (residual is None or residual.dtype == states.dtype)
        fast = fast and self.weight is not None
        if residual is None:
            return self._fast(states) if fast else self._plain(states)
        if self.sums is not None:
            if fast and self.sums.suits(states):
                return self.sums.add_norm(states, residual, self.weight, self.eps, self.plus_one)
            states = self.sums.group.add(states)
        if fast:
            return self._fast_sum(states, residual)
        residual += states
        return self._plain(residual).to(states.dtype)

    def _plain(self, states: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
        wide = states.float()
        wide = wide * torch.rsqrt((mean_square(wide) if mean is None else mean) + self.eps)
        if self.weight is not None:
            weight = self.weight.float()
            wide = wide * (weight + 1 if self.plus_one else weight)
        return wide.to(states.dtype)

    def _fast(self, states: torch.Tensor) -> torch.Tensor:
        """FlashInfer reads heads [T, heads, width] where they are, but for Gemma's norm."""
        assert self.kernels is not None
        if self.plus_one:
            return self.kernels.gemma_rmsnorm(states.reshape(-1, states.shape[-1]), self.weight, self.eps).view(states.shape)
        return self.kernels.rmsnorm(states, self.weight, self.eps)

    def _fast_sum(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        assert self.kernels is not None
        if self.rounder is not None:
            return attach(states, self.rounder.add_norm(states, residual, self.weight, self.eps, self.plus_one))
        add = self.kernels.gemma_fused_add_rmsnorm if self.plus_one else self.kernels.fused_add_rmsnorm
        add(states, residual, self.weight, self.eps)
        return states


class LayerNorm(nn.LayerNorm):
    """Layer norm (Ba et al. 2016), in float32, by its weight, or weight + 1 as in Nemotron."""

    def __init__(self, width: int, eps: float, weight: bool = True, bias: bool = True, plus_one: bool = False) -> None:
        super().__init__(width, eps, weight, bias)
        self.plus_one = plus_one

    def forward(self, states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """As `RmsNorm.forward`."""
        if residual is not None:
            residual += states
            states = residual
        if self.weight is not None and self.weight.dim() > 1:  # each head has its own
            return self.weight * functional.layer_norm(states, self.normalized_shape, eps=self.eps)
        weight = self.weight + 1 if self.plus_one else self.weight
        return functional.layer_norm(states, self.normalized_shape, weight, self.bias, self.eps)
