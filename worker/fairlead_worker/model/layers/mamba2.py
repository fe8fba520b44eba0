"""Mamba 2 (Dao and Gu 2024): a linear attention whose state forgets at a rate that each token sets for each head.

A head's state S [state, head_dim] becomes S' = a S + B (t x)^T with a token's input x, step t, a = exp(-t exp(A)), and vectors B and C that
a group of heads shares; the output is S'^T C + D x.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.kernels.states import RecurrentContext, StateSpec
from fairlead_worker.model.layers.convolution import CausalConvolution
from fairlead_worker.sharding.group import Group
from fairlead_worker.sharding.shards import AnyCut, Ranks, Unshardable, cut_spans

CHUNK = 64
"""Tokens whose outputs are computed together from one state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """The sizes of a Mamba 2 layer, and its variants."""

    width: int
    heads: int
    head_dim: int
    state: int
    groups: int
    """Of heads that share B and C, and of the norm."""
    convolution: int
    """Tokens that the convolution before it sees."""
    convolution_bias: bool
    bias: bool
    output_bias: bool
    eps: float
    limit: tuple[float, float]
    """The least and the largest step."""
    factors: tuple[float, float, float, float, float] | None = None
    """Of the projected gates, inputs, B, C and steps (Falcon-H1); None: 1."""
    norm: bool = True
    gate_after_norm: bool = False

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def sections(self) -> list[int]:
        """Return the sizes of x, B and C side by side."""
        return [self.inner, self.groups * self.state, self.groups * self.state]


class SharedGroup(NamedTuple):
    """A group of heads that several ranks share."""

    group: int
    groups: int
    ranks: int
    """How many ranks have a part of it."""


class GroupNorm(nn.Module):
    """RMS norm of each group of channels, after or before the product with silu(gate)."""

    def __init__(self, shape: Mamba2Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.inner))
        self.shape = shape
        self.shared: SharedGroup | None = None
        self.ranks: Group | None = None
        """Those that share the norm's group; None while the model is not connected."""

    def forward(self, states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return [T, inner] of states and gate of this shape."""
        shape, dtype, wide = self.shape, states.dtype, states.float()
        gate = functional.silu(gate.float())
        if not shape.gate_after_norm:
            wide = wide * gate
        groups = torch.unflatten(wide, -1, (shape.groups, -1))
        normed = (groups * torch.rsqrt(self._mean(groups.square()) + shape.eps)).flatten(-2)
        if not shape.gate_after_norm:
            return self.weight * normed.to(dtype)
        return (self.weight * normed * gate).to(dtype)

    def _mean(self, squares: torch.Tensor) -> torch.Tensor:
        """Return [T, groups, 1], the mean of each group, of squares [T, groups, channels]."""
        mean = squares.mean(-1, keepdim=True)
        if self.shared is None or self.ranks is None:
            return mean
        all_groups = mean.new_zeros(len(mean), self.shared.groups, 1)
        own = slice(self.shared.group, self.shared.group + 1)
        all_groups[:, own] = mean / self.shared.ranks
        return self.ranks.add(all_groups)[:, own]


class Mamba2(nn.Module):
    """A Mamba 2 layer, by the names of transformers."""

    def __init__(self, shape: Mamba2Shape, index: int) -> None:
        """index: among the recurrent layers."""
        super().__init__()
        self.shape, self.index = shape, index
        channels = sum(shape.sections)
        self.in_proj = nn.Linear(shape.width, shape.inner + channels + shape.heads, shape.bias)
        self.conv1d = CausalConvolution(channels, shape.convolution, shape.convolution_bias)
        self.dt_bias = nn.Parameter(torch.empty(shape.heads))
        self.A_log = nn.Parameter(torch.empty(shape.heads))
        self.D = nn.Parameter(torch.empty(shape.heads))
        if shape.norm:
            self.norm = GroupNorm(shape)
        self.out_proj = nn.Linear(shape.inner, shape.width, shape.output_bias)

    def divide(self, ranks: Ranks) -> dict[str, AnyCut]:
        """Keep a rank's heads and their groups; return the parts of its tensors, by name. Raises Unshardable.

        Ranks that share a group all compute its B and C, as in vLLM, and sum for its norm.
        """
        shape = self.shape
        heads, groups = ranks.share(shape.heads, "heads"), max(1, shape.groups // ranks.size)
        if shape.groups % ranks.size and ranks.size % shape.groups:
            raise Unshardable(f"its {shape.groups} groups of heads neither divide {ranks.size} ranks nor are divided by them")
        first = ranks.rank * shape.groups // ranks.size
        head, channel = (ranks.rank * heads, (ranks.rank + 1) * heads), ranks.rank * heads * shape.head_dim
        inner, vector = (channel, channel + heads * shape.head_dim), (first * shape.state, (first + groups) * shape.state)
        spans, by_head = (inner, vector, vector), ranks.cut(shape.heads)
        cuts = {
            "in_proj": cut_spans([shape.inner, *shape.sections, shape.heads], [inner, *spans, head]),
            "conv1d": cut_spans(shape.sections, spans),
            **dict.fromkeys(("dt_bias", "A_log", "D"), by_head),
            "out_proj": ranks.cut(shape.inner, dim=1),
        }
        self.shape = replace(shape, heads=heads, groups=groups)
        if shape.norm:
            cuts["norm.weight"] = ranks.cut(shape.inner)
            self.norm.shape = self.shape
            if shape.groups < ranks.size:
                self.norm.shared = SharedGroup(first, shape.groups, ranks.size // shape.groups)
        return cuts

    @property
    def state(self) -> StateSpec:
        shape, convolution = self.shape, self.conv1d.state
        heads = (shape.heads, shape.state, shape.head_dim)
        return StateSpec((*convolution.shapes, heads), (*convolution.dtypes, torch.float32))

    def forward(self, states: torch.Tensor, context: RecurrentContext) -> torch.Tensor:
        """Return [T, width] for states [T, width]."""
        shape = self.shape
        parts = torch.split(self.in_proj(states), [shape.inner, *shape.sections, shape.heads], -1)
        if shape.factors is not None:
            parts = tuple(part * factor for part, factor in zip(parts, shape.factors, strict=True))
        gate, *mixed, steps = parts
        steps = functional.softplus(steps.float() + self.dt_bias.float()).clamp(*shape.limit)
        scanned = context.scan(self, torch.cat(mixed, -1), steps).flatten(1)
        out: torch.Tensor = self.out_proj(self.norm(scanned, gate) if shape.norm else scanned * functional.silu(gate))
        return out

    def advance(self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """inputs: x, B and C side by side, and the steps. Returns [B, L, heads, head_dim]."""
        shape, (mixed, steps) = self.shape, inputs
        convolved, last = self.conv1d.advance(mixed, states[0])
        x, *vectors = torch.split(functional.silu(convolved), shape.sections, -1)
        x = torch.unflatten(x, -1, (shape.heads, -1)).float().transpose(1, 2)
        b, c = (_by_head(part, shape).transpose(1, 2) for part in vectors)
        steps = steps.transpose(1, 2)
        log_decay = -steps * self.A_log.float().exp()[:, None]
        outputs, state = advance_decaying(c, b, x * steps[..., None], log_decay, states[1])
        outputs = outputs + x * self.D.float()[:, None, None]
        return outputs.transpose(1, 2).to(mixed.dtype), (last, state)


def _by_head(part: torch.Tensor, shape: Mamba2Shape) -> torch.Tensor:
    """Return [B, L, heads, state] of vectors of each group, [B, L, groups * state]."""
    return torch.unflatten(part, -1, (shape.groups, -1)).float().repeat_interleave(shape.heads // shape.groups, 2)


def advance_decaying(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [B, heads, L, value_dim] and the state [B, heads, key_dim, value_dim] after L tokens, all float32.

    query, key: [B, heads, L, key_dim]. log_decay: [B, heads, L].
    """
    if query.shape[2] == 1:
        state = state * log_decay.exp()[..., None] + key.transpose(-1, -2) * value
        return query @ state, state
    outputs = []
    for begin in range(0, query.shape[2], CHUNK):
        q, k, v, decay = (part[:, :, begin : begin + CHUNK] for part in (query, key, value, log_decay))
        total = decay.cumsum(-1)  # from the chunk's beginning
        after = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(after, float("-inf")).exp()
        outputs.append((q @ k.transpose(-1, -2) * between) @ v + (q * total.exp()[..., None]) @ state)
        left = (total[..., -1:] - total).exp()[..., None]
        state = state * total[..., -1:, None].exp() + (k * left).transpose(-1, -2) @ v
    return torch.cat(outputs, 2), state
