"""Gated short convolutions (LFM2, Liquid AI 2025): of all tokens before it, a token reads the last few."""

from collections.abc import Sequence

import torch
from torch import nn

from fairlead_worker.kernels.states import RecurrentContext, StateSpec
from fairlead_worker.model.layers.convolution import CausalConvolution
from fairlead_worker.sharding.shards import AnyCut, Ranks


class ShortConvolution(nn.Module):
    """out(c * convolution(b * x)), where b, c and x are projections of the input."""

    def __init__(self, width: int, size: int, bias: bool, index: int) -> None:
        """size: tokens that it reads. index: among the recurrent layers."""
        super().__init__()
        self.index = index
        self.in_proj = nn.Linear(width, 3 * width, bias)
        self.conv = CausalConvolution(width, size, bias)
        self.out_proj = nn.Linear(width, width, bias)

    def divide(self, ranks: Ranks) -> dict[str, AnyCut]:
        """Return the parts of its tensors, by name: a rank has some channels. Raises Unshardable."""
        width = self.in_proj.in_features
        ranks.share(width, "channels")
        return {"in_proj": ranks.cut(width, width, width), "conv": ranks.cut(width), "out_proj": ranks.cut(width, dim=1)}

    @property
    def state(self) -> StateSpec:
        return self.conv.state

    def forward(self, states: torch.Tensor, context: RecurrentContext) -> torch.Tensor:
        """Return [T, width] for states [T, width]."""
        before, after, mixed = self.in_proj(states).chunk(3, -1)
        out: torch.Tensor = self.out_proj(after * context.scan(self, before * mixed))
        return out

    def advance(self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        outputs, last = self.conv.advance(inputs[0], states[0])
        return outputs, (last,)
