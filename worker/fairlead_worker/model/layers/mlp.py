"""Feed-forward layers and their activations."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}
"""By their names in config.json."""


class Mlp(nn.Module):
    """down(activation(up(x))); gated: the first half of `up` is activated and multiplied by the second (GeGLU, Shazeer 2020)."""

    def __init__(self, width: int, inner: int, activation: str, bias: bool = True, gated: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * inner if gated else inner, bias)
        self.down = nn.Linear(inner, width, bias)
        self.activation = ACTIVATIONS[activation]
        self.gated = gated

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return [tokens, width] for states [tokens, width]."""
        inner = self.up(states)
        if self.gated:
            inner, gate = inner.chunk(2, -1)
            inner = self.activation(inner) * gate
        else:
            inner = self.activation(inner)
        out: torch.Tensor = self.down(inner)
        return out
