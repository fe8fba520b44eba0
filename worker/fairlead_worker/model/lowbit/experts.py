"""Experts whose weights stay in 8 or 4 bits on a GPU: rows sorted by expert, and products that read the used experts in their bits.

No library has such a product for compute capability 9.0 and torch's layout. FlashInfer 0.7's grouped float8 products in blocks begin at
10.0; its `cutlass_fused_moe` compiles DeepGEMM's kernels in the serving process, for each size. torch's `scaled_grouped_mm` takes scales of
rows only, and needs the rows of a token copied for each of its experts. So the product is a Triton kernel of ours, as in vLLM and SGLang.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import nn

from fairlead_worker.model.lowbit.linear import LowBitLinear, widen
from fairlead_worker.model.lowbit.rows import ACTIVATIONS, FLOAT8, GROUP, Rounded, Rounder, dequantized

MX_GROUP = 32
"""Numbers that share a scale in MXFP4 (OCP Microscaling Formats, 1.0)."""
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of float4 (e2m1) without a sign, by their bits."""


class Scales(Enum):
    """What shares a scale of a weight."""

    BLOCKS = "blocks"
    """128 by 128 numbers of float8: scales [experts, outputs / 128, inputs / 128] float32."""
    ROWS = "rows"
    """An output in float8: scales [experts, outputs] float32."""
    GROUPS = "groups"
    """32 inputs of an output in float4 (MXFP4): scales [experts, outputs, inputs / 32] uint8, exponents of 2 plus 127."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The weights of one projection of all experts."""

    values: torch.Tensor
    """[experts, outputs, inputs] float8; in groups [experts, outputs, inputs / 2] uint8, the first of two numbers in the lower bits."""
    scale: torch.Tensor
    """Contiguous."""
    scales: Scales

    @property
    def inputs(self) -> int:
        return self.values.shape[2] * (2 if self.scales is Scales.GROUPS else 1)

    def numbers(self) -> torch.Tensor:
        """Return [experts, outputs, inputs] float32."""
        if self.scales is Scales.GROUPS:
            return widen_mx(self.values, self.scale)
        if self.scales is Scales.ROWS:
            return self.values.float() * self.scale[:, :, None]
        return widen(self.values, self.scale, (GROUP, GROUP))


def widen_mx(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return MXFP4 numbers, values [..., inputs / 2] and scale [..., groups] uint8, as [..., inputs] float32."""
    unpacked = unpack_float4(values).view(*scale.shape, -1)
    return torch.ldexp(unpacked, scale[..., None].int() - 127).flatten(-2)


def unpack_float4(values: torch.Tensor) -> torch.Tensor:
    """Return the float4 numbers of bytes [..., n], the first of two in the lower bits: [..., 2 * n] float32."""
    known = torch.tensor([*FOUR_BITS, *(-number for number in FOUR_BITS)], device=values.device)
    return known[torch.stack([values & 15, values >> 4], -1).long()].flatten(-2)


class Route(NamedTuple):
    """Which expert reads which row. A pair is a token and one of its experts; pairs are numbered token after token."""

    order: torch.Tensor
    """[pairs] int64: the pairs sorted by expert."""
    ends: torch.Tensor
    """[experts] int32: the place in `order` after an expert's last pair."""


class Product(Protocol):
    """Multiplies rows by the weights of their experts."""

    def multiply(self, inputs: torch.Tensor | Rounded, weights: ExpertWeights, route: Route, each: int) -> torch.Tensor:
        """Return [pairs, outputs] bfloat16. inputs [pairs / each, inputs]: bfloat16, or rounded with scales like those of the weights."""
        ...


def find_route(top_k_index: torch.Tensor, numbers: torch.Tensor) -> Route:
    """Return the route of tokens with experts [tokens, choices]. numbers: 0 to the number of experts, exclusive, int64."""
    experts, order = top_k_index.reshape(-1).sort()
    return Route(order, torch.searchsorted(experts, numbers, right=True, out_int32=True))


def sum_choices(pairs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [tokens, width]: the sum of each token's pairs [tokens * choices, width], by weights [tokens, choices]."""
    choices = pairs.view(*weights.shape, pairs.shape[-1])
    if weights.dtype == pairs.dtype:
        return torch.bmm(weights[:, None], choices)[:, 0]
    return (choices * weights[:, :, None]).sum(1).to(pairs.dtype)


class LowBitExperts(nn.Module):
    """The experts of a layer. Inputs of products are rounded to float8 if there is a `rounder`, otherwise weights are widened in the
    kernel, which any GPU from 8.0 on can do.
    """

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        activation: str,
        product: Product,
        rounder: Rounder | None,
    ) -> None:
        """gate_up: outputs of gate, then of up. activation: a name of `ACTIVATIONS`."""
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self.product, self.rounder = product, rounder
        self.numbers = torch.arange(len(gate_up.values), device=gate_up.values.device)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return [tokens, width] for tokens [tokens, width], their experts [tokens, choices] and the weights of these."""
        route = find_route(top_k_index, self.numbers)
        inputs = hidden_states if self.rounder is None else self.rounder.round(hidden_states)
        both = self.product.multiply(inputs, self.gate_up, route, top_k_index.shape[1])
        return sum_choices(self.product.multiply(self._inner(both), self.down, route, 1), top_k_weights)

    def _inner(self, both: torch.Tensor) -> torch.Tensor | Rounded:
        if self.rounder is not None and self.rounder.fuses:
            return self.rounder.gated(both, self.activation)
        gate, up = both.chunk(2, -1)
        inner = ACTIVATIONS[self.activation](gate) * up
        return inner if self.rounder is None else self.rounder.round(inner)


class PlainProduct:
    """The same products expert after expert in float32, on any device: what kernels are compared with."""

    def multiply(self, inputs: torch.Tensor | Rounded, weights: ExpertWeights, route: Route, each: int) -> torch.Tensor:
        rows = dequantized(inputs) if isinstance(inputs, Rounded) else inputs.float()
        return multiply_exactly(rows, weights, route, each).bfloat16()


def multiply_exactly(rows: torch.Tensor, weights: ExpertWeights, route: Route, each: int) -> torch.Tensor:
    """Return `Product.multiply` of float32 rows in float32. Only the weights of experts that some row needs are widened."""
    out = rows.new_empty(len(route.order), weights.values.shape[1])
    begin = 0
    for expert, end in enumerate(route.ends.tolist()):
        if end > begin:
            pairs, one = route.order[begin:end], slice(expert, expert + 1)
            out[pairs] = rows[pairs // each] @ ExpertWeights(weights.values[one], weights.scale[one], weights.scales).numbers()[0].T
        begin = end
    return out


def draw_weights(experts: int, outputs: int, inputs: int, scales: Scales, drawn: torch.Generator, device: torch.device) -> ExpertWeights:
    """Return random weights."""
    if scales is Scales.GROUPS:
        values = torch.randint(256, (experts, outputs, inputs // 2), generator=drawn, dtype=torch.uint8).to(device)
        scale = torch.randint(120, 130, (experts, outputs, inputs // MX_GROUP), generator=drawn, dtype=torch.uint8)
    else:
        values = torch.randn(experts, outputs, inputs, generator=drawn).to(device).to(FLOAT8)
        shape = (experts, -(-outputs // GROUP), -(-inputs // GROUP)) if scales is Scales.BLOCKS else (experts, outputs)
        scale = 1 + torch.rand(*shape, generator=drawn)
    return ExpertWeights(values, scale.to(device), scales)


def rounds_inputs(module: nn.Module) -> bool:
    """Return whether some layer of `module` rounds its inputs to 8 bits."""
    return any((isinstance(part, LowBitLinear) and part.rounds) or isinstance(part, LowBitExperts) for part in module.modules())
