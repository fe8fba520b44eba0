"""Mamba (Gu and Dao 2023): a state for each channel, which forgets at a rate that each token sets.

A channel's state h [state] becomes h' = exp(t A) h + t B x with a token's input x, step t and vector B; the output is C h' + D x.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.kernels.states import RecurrentContext, StateSpec
from fairlead_worker.model.layers.convolution import CausalConvolution
from fairlead_worker.sharding.shards import AnyCut, Ranks

BLOCK = 64
"""Tokens whose rates are computed together, to bound memory."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the layer's two states, with projections between them, which see a step's tokens as they are. Implements `Recurrent`."""

    index: int
    state: StateSpec
    advance: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], tuple[torch.Tensor, Sequence[torch.Tensor]]]


class Mamba1(nn.Module):
    """A Mamba layer, by the names of transformers. It has two states: two indices among those of the model."""

    def __init__(
        self,
        width: int,
        inner: int,
        state: int,
        rank: int,
        convolution: int,
        index: int,
        *,
        bias: bool,
        convolution_bias: bool,
        make_norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        """rank: of the projection of steps. index: among the recurrent layers. make_norm: of steps, B and C; None: they have no norms."""
        super().__init__()
        self._index, self._sizes = index, [rank, state, state]
        self.in_proj = nn.Linear(width, 2 * inner, bias)
        self.conv1d = CausalConvolution(inner, convolution, convolution_bias)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, state))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, width, bias)
        self._has_norms = make_norm is not None
        if make_norm is not None:
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = map(make_norm, self._sizes)

    def divide(self, ranks: Ranks) -> dict[str, AnyCut]:
        """Return the parts of its tensors, by name. Ranks sum steps, B and C, and each has some channels. Raises Unshardable."""
        inner = len(self.D)
        ranks.share(inner, "channels")
        rows, columns = ranks.cut(inner), ranks.cut(inner, dim=1)
        parts = dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), rows) | dict.fromkeys(("x_proj", "out_proj"), columns)
        return {"in_proj": ranks.cut(inner, inner), **parts}

    @property
    def states(self) -> tuple[StateSpec, StateSpec]:
        """Return what the convolution and the recurrence keep."""
        return self.conv1d.state, StateSpec((tuple(self.A_log.shape),), (torch.float32,))

    def forward(self, states: torch.Tensor, context: RecurrentContext) -> torch.Tensor:
        """Return [T, width] for states [T, width]."""
        first, second = self.states
        x, gate = self.in_proj(states).chunk(2, -1)
        x = context.scan(_Part(2 * self._index, first, self._convolve), x)
        step, b, c = torch.split(self.x_proj(x), self._sizes, -1)
        if self._has_norms:
            step, b, c = self.dt_layernorm(step), self.b_layernorm(b), self.c_layernorm(c)
        step = functional.softplus(self.dt_proj(step).float())
        scanned = context.scan(_Part(2 * self._index + 1, second, self._advance), x, step, b, c)
        out: torch.Tensor = self.out_proj((scanned + x * self.D) * functional.silu(gate))
        return out

    def _convolve(self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        outputs, last = self.conv1d.advance(inputs[0], states[0])
        return functional.silu(outputs), (last,)

    def _advance(self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """inputs: x and steps [B, L, inner], B and C [B, L, state]. Tokens follow one another: no product covers several."""
        x, steps, b, c = (part.float() for part in inputs)
        rates, state, outputs = -self.A_log.float().exp(), states[0], []
        for begin in range(0, x.shape[1], BLOCK):
            block = slice(begin, begin + BLOCK)
            kept = (steps[:, block, :, None] * rates).exp().unbind(1)
            added = ((steps * x)[:, block, :, None] * b[:, block, None]).unbind(1)
            for token, (keep, add) in enumerate(zip(kept, added, strict=True), begin):
                state = state * keep + add
                outputs.append((state @ c[:, token, :, None])[..., 0])
        return torch.stack(outputs, 1).to(inputs[0].dtype), (state,)
