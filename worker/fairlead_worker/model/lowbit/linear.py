"""Linear layers whose weights stay in few bits on a GPU. Unlike a library's tensor types they can be stacked."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.model.lowbit.rows import GROUP, ROWS, Rounded, Rounder, attached

CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply float8: Ada and Hopper."""
TILE = 16
"""Products of float8 take numbers of inputs and of outputs that are multiples of this."""


class LowBitLinear(nn.Module):
    """A linear layer of some form of low-bit weight; `numbers` says what the weight stands for."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    """Of its outputs."""
    device: torch.device
    bias: nn.Parameter | None
    rounds = False
    """Whether inputs are rounded to fewer bits."""

    def matches(self, other: nn.Module) -> bool:
        """Return whether `other` can be stacked with this layer: the same inputs, form and dtype."""
        return (
            type(other) is type(self)
            and other.in_features == self.in_features
            and other.dtype == self.dtype
            and (other.bias is None) == (self.bias is None)
        )

    def stacked(self, others: Sequence[Any]) -> Self:
        """Return one layer with the outputs of this layer and of `others`, which it matches."""
        raise NotImplementedError

    def part(self, begin: int, end: int) -> Self:
        """Return a layer with these outputs only."""
        raise NotImplementedError

    def numbers(self) -> torch.Tensor:
        """Return the weight as [outputs, inputs] float32."""
        raise NotImplementedError


class Fp8WeightLinear(LowBitLinear):
    """float8 weights with a scale for each output, widened for each product: this saves memory alone."""

    each = 1
    """Outputs that share a scale."""
    scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """weight [outputs, inputs] float8, scale [outputs / each, scales of a row] float32, bias [outputs]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = dtype, weight.device
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, inputs: Any) -> torch.Tensor:
        """Multiply [..., inputs]."""
        return functional.linear(inputs, self.numbers().to(self.dtype), self.bias)

    def matches(self, other: nn.Module) -> bool:
        return type(self) is not Fp8WeightLinear and super().matches(other)

    def part(self, begin: int, end: int) -> Self:
        bias = None if self.bias is None else self.bias.detach()[begin:end]
        return self._like(self.weight.detach()[begin:end], self.scale[begin // self.each : -(-end // self.each)], bias)

    def numbers(self) -> torch.Tensor:
        return self.weight.detach().float() * self.scale

    def _like(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Self:
        """Return such a layer of other numbers."""
        return type(self)(weight, scale, bias, self.dtype)


class Fp8Linear(Fp8WeightLinear):
    """float8 weights, and inputs rounded to float8: one product of the two.

    A scale covers an output of the weight and a token of the inputs.
    """

    blocks = False
    rounds = True

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, rounder: Rounder) -> None:
        super().__init__(weight, scale, bias, dtype)
        self.rounder = rounder

    def forward(self, inputs: torch.Tensor | Rounded) -> torch.Tensor:
        """Multiply [..., inputs], or the rounded form of it."""
        rounded = inputs if isinstance(inputs, Rounded) else attached(inputs) or self.rounder.round(inputs)
        shape = (*rounded.shape[:-1], self.out_features)
        if not len(rounded.values):
            return torch.empty(shape, dtype=self.dtype, device=self.weight.device)
        return self.multiply(rounded)[: torch.Size(shape[:-1]).numel()].view(shape)

    def multiply(self, rounded: Rounded) -> torch.Tensor:
        """Return [T, outputs]."""
        return torch._scaled_mm(
            rounded.values,
            self.weight.t(),
            scale_a=rounded.scale,
            scale_b=self.scale.t(),
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )

    def stacked(self, others: Sequence[Any]) -> Self:
        parts = (self, *others)
        weight, scale = (torch.cat([getattr(part, name).detach() for part in parts]) for name in ("weight", "scale"))
        bias = None if self.bias is None else torch.cat([part.bias.detach() for part in parts])
        return self._like(weight, scale, bias)

    def _like(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Self:
        return type(self)(weight, scale, bias, self.dtype, self.rounder)


class Fp8BlockLinear(Fp8Linear):
    """As `Fp8Linear`, with a scale for 128 by 128 numbers of the weight, and for 128 numbers of a token (DeepSeek-V3, 3.3.2)."""

    each = GROUP
    blocks = True

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, rounder: Rounder) -> None:
        # cuBLAS reads the scales of a row of blocks in multiples of ROWS.
        scale = functional.pad(scale, (0, -scale.shape[1] % ROWS)).contiguous()
        super().__init__(weight, scale, bias, dtype, rounder)

    def matches(self, other: nn.Module) -> bool:
        return super().matches(other) and isinstance(other, Fp8BlockLinear) and not (self.out_features | other.out_features) % GROUP

    def multiply(self, rounded: Rounded) -> torch.Tensor:
        kind = functional.ScalingType
        answer: torch.Tensor = functional.scaled_mm(
            rounded.values,
            self.weight.t(),
            rounded.scale,
            kind.BlockWise1x128,
            self.scale.t(),
            kind.BlockWise128x128,
            bias=self.bias,
            output_dtype=self.dtype,
        )
        return answer

    def numbers(self) -> torch.Tensor:
        return widen(self.weight.detach(), self.scale[:, : -(-self.in_features // GROUP)], (GROUP, GROUP))


def widen(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return a weight [..., outputs, inputs] times its grid of scales, in float32. Raises ValueError.

    block: outputs and inputs that share a scale; 0: unknown. A rank's part may have a finer grid: then its entries are for equal parts.
    """
    grid = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()  # exponents, as in MXFP8
    if grid.numel() == 1:
        return weight.float() * grid.reshape(())
    for dim, each in zip((-2, -1), block, strict=True):
        size, count = weight.shape[dim], grid.shape[dim]
        if not each or -(-size // each) != count:
            if size % count:
                raise ValueError(f"a weight of {tuple(weight.shape)} has scales of {tuple(scale.shape)}")
            each = size // count
        grid = grid.repeat_interleave(each, dim).narrow(dim, 0, size)
    return weight.float() * grid


def multiplies(weight: torch.Tensor) -> bool:
    """Return whether the device of `weight` [outputs, inputs] multiplies float8 of that size."""
    on_gpu = weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) >= CAPABILITY
    return on_gpu and not any(size % TILE for size in weight.shape)


def is_plain(module: nn.Module) -> bool:
    """Return whether the layer's weight is an ordinary tensor, not a library's own type, and its output depends on nothing else."""
    return not isinstance(module, LowBitLinear) and type(getattr(module, "weight", None)) in (torch.Tensor, nn.Parameter)


def keep_fp8(model: nn.Module, dtype: torch.dtype, choose: Callable[[torch.device], Rounder]) -> int:
    """Replace layers of `model` whose weight is torchao's float8 tensor, and whose inputs it rounds, in place; return how many.

    torchao's tensor is neither stacked nor fused with what computes its inputs. The weight is not copied. `choose`: as
    `lowbit.choose.choose_rounder`.
    """
    made = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            weight: Any = getattr(layer, "weight", None)
            if type(layer) is nn.Linear and getattr(weight, "act_quant_kwargs", None) is not None and hasattr(weight, "qdata"):
                scale = weight.scale.expand(layer.out_features, 1).contiguous()
                setattr(parent, name, Fp8Linear(weight.qdata, scale, layer.bias, dtype, choose(scale.device)))
                made += 1
    return made
