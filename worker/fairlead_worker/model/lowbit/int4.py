"""Weights of 4 bits on a GPU: torch's int4 kernel (`aten::_weight_int4pack_mm`, tinygemm) for few rows, Triton's for more, cuBLAS for many.

The kernel multiplies by `bfloat16((code - 8) * scale + zero)`, where scale and zero are bfloat16 and cover a group of an output's inputs.
All ways use the same rounded numbers and one copy of them, in torch's layout. Neither torch nor FlashInfer 0.7 has a kernel for 4-bit
integers that stays fast beyond some rows.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.model.lowbit.linear import LowBitLinear

logger = logging.getLogger(__name__)

CAPABILITY = (8, 0)
"""Compute capability from which the kernel runs: it multiplies bfloat16."""
GROUPS = (256, 128, 64, 32)
"""Inputs that share a scale, in the kernel."""
TILE = 16
"""Inputs, and rows, of one product of the tensor cores."""
FEW, MANY = 8, 128
"""Most rows for torch's kernel, and for Triton's.

torch's computes 16 rows of 8 outputs in a block. So it reads the weight once for 16 rows (half a byte for a number), and each row once for
8 outputs (2 / 8 bytes for a number of the weight), all but the first half byte from the L2 cache. 8 rows are 2.5 bytes of a cache that is
1.2 to 3 times as fast as memory (H200, A100), 16 rows 4.5 bytes. bfloat16 takes 2 bytes of memory, so beyond 8 rows 4 bits would be slower.

Triton's kernel reads the weight once for 64 rows. Widening it for cuBLAS takes 0.5 + 2 + 2 = 4.5 bytes of memory, then FLOPs alone count:
2 * rows / 989e12 s for a number, as long as 4.5 bytes at 4.8e12 bytes/s from 460 rows on. Triton's reaches about half of cuBLAS' FLOP/s,
so that the ways take the same time at 460 / 2 rows at most; widening for each 64 rows (about 8 instructions for a number) costs the rest.
"""
ROWS = 32
"""Most rows for torch's kernel where there is no kernel of Triton: 4.5 bytes of cache for each 16, or 4.5 bytes of memory."""
OFF = 0.01
"""How far a product may be from one in float32, over its norm: outputs are rounded to bfloat16 (2**-8 at most)."""


class Kernels(NamedTuple):
    """How a device computes with packed weights."""

    widen: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Returns a packed weight, with its scales and zeros, as [outputs, inputs] bfloat16."""
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Multiplies rows by a packed weight with 8 tiles side by side, and its scales and zeros. None: there is no such kernel."""


def tiles_of(inputs: int) -> int:
    """Return how many tiles of inputs lie side by side in the packed weight: 8, 4 or 2; 0 if the kernel cannot take so many inputs."""
    return next((count for count in (8, 4, 2) if inputs % (TILE * count) == 0), 0)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [outputs, inputs] (uint8, 0 to 15) -> int32 [outputs / 8, inputs / (16 * tiles), 32, tiles / 2], the kernel's layout.

    A word has 8 inputs of an output: 0, 8, 16 and 24 of 32, then the odd ones beside them. (`matrix_to_m16n8k16_Bint4_layout` of torch.)
    """
    outputs, inputs = codes.shape
    tiles = tiles_of(inputs)
    parts = codes.reshape(outputs // 8, 8, inputs // (TILE * tiles), tiles // 2, 4, 4, 2).permute(0, 2, 1, 5, 3, 6, 4)
    # [outputs / 8, tiles of inputs, output, pair, 32 inputs, odd, 8 inputs]: the last two are a word's codes, from its lowest bits on.
    pairs = parts.reshape(outputs // 8, -1, 32, tiles // 2, 4, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32).squeeze(-1)


def unpack(weight: torch.Tensor) -> torch.Tensor:
    """Return the codes of a packed weight: [outputs, inputs] uint8."""
    outputs, inputs = shape_of(weight)
    places = weight.unsqueeze(-1).view(torch.uint8)
    parts = torch.stack((places & 15, places >> 4), -1).view(outputs // 8, weight.shape[1], 8, 4, -1, 2, 4)
    return parts.permute(0, 2, 1, 4, 6, 3, 5).reshape(outputs, inputs)


def shape_of(weight: torch.Tensor) -> tuple[int, int]:
    """Return (outputs, inputs) of a packed weight."""
    return 8 * weight.shape[0], 2 * TILE * weight.shape[1] * weight.shape[3]


def scales_and_zeros(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return [groups, outputs, 2] bfloat16 of the scale and the zero point (a code) [outputs, groups] of each group.

    A number of a checkpoint is (code - zero point) * scale, the kernel's (code - 8) * scale + zero. So zero is (8 - zero point) * scale.
    A scale is off by 2**-8 at most, as in other computations in bfloat16. zero is exact where the zero point is 8, or 1, 2, 4 or 8 away
    from it. Elsewhere it is off by at most 7 * 2**-8 of the scale: 2.7 % of a step between two codes.
    """
    rounded = scale.to(torch.bfloat16)
    pairs = torch.stack((rounded, ((8 - zero.float()) * rounded.float()).to(torch.bfloat16)), -1)
    return pairs.transpose(0, 1).contiguous()


def widen(weight: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a packed weight, as the kernel rounds them: [outputs, inputs] bfloat16."""
    scale, zero = (part.T.unsqueeze(-1) for part in pairs.float().unbind(-1))
    codes = unpack(weight).view(len(scale), len(pairs), -1)
    wide: torch.Tensor = ((codes.float() - 8) * scale + zero).flatten(1).to(torch.bfloat16)
    return wide


@cache
def kernels(device: torch.device) -> Kernels:
    """Return Triton's kernels; torch's operators, with the reason in the log, where Triton's do not run on `device` or differ."""
    plain = Kernels(widen)
    try:
        from fairlead_worker.model.lowbit.kernels import int4
        from fairlead_worker.model.lowbit.kernels.rows import use_prebuilt_driver

        use_prebuilt_driver()
        made = Kernels(int4.widen, int4.multiply)
        for inputs, group in ((384, 128), (320, 64)):
            layer = _sample(device, inputs, group, made)
            if not torch.equal(layer.widened(), widen(layer.weight, layer.pairs)):
                raise RuntimeError("its widened numbers differ")
            if tiles_of(inputs) == 8:
                rows = torch.randn(MANY, inputs, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
                want = rows.float() @ layer.numbers().T
                if not ((int4.multiply(rows, layer.weight, layer.pairs).float() - want).norm() / want.norm()).item() <= OFF:
                    raise RuntimeError("its products differ")
    except Exception as error:  # Triton raises its own kinds
        logger.warning("4-bit weights are widened by torch for more than %d rows: Triton: %s: %s", ROWS, type(error).__name__, error)
        return plain
    return made


class Int4Linear(LowBitLinear):
    """A linear layer whose weight stays in 4 bits, for inputs in bfloat16."""

    pairs: torch.Tensor
    order: torch.Tensor | None

    def __init__(
        self, weight: torch.Tensor, pairs: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels, order: torch.Tensor | None = None
    ) -> None:
        """weight: of `pack`. pairs: of `scales_and_zeros`. order [inputs]: which input each column of the weight multiplies (act-order)."""
        super().__init__()
        self.out_features, self.in_features = shape_of(weight)
        self.dtype, self.device, self.kernels = torch.bfloat16, weight.device, kernels
        self.group = self.in_features // len(pairs)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("pairs", pairs)
        self.register_buffer("order", order)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(self.dtype), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply [..., inputs]."""
        rows = inputs.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        count = len(rows)
        if not count:
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        fused = self.kernels.multiply if tiles_of(self.in_features) == 8 else None
        if count > (ROWS if fused is None else MANY):
            answer = functional.linear(rows, self.widened(), self.bias)
        else:
            rows = rows.contiguous()
            answer = self.multiply(rows) if fused is None or count <= FEW else fused(rows, self.weight, self.pairs)
            if self.bias is not None:
                answer += self.bias
        return answer.view(*inputs.shape[:-1], self.out_features)

    def widened(self) -> torch.Tensor:
        """Return the weight as [outputs, inputs] bfloat16, its columns in their own order."""
        return self.kernels.widen(self.weight, self.pairs)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [T, outputs], without the bias."""
        answer: torch.Tensor = torch.ops.aten._weight_int4pack_mm(rows, self.weight, self.group, self.pairs)
        return answer

    def matches(self, other: nn.Module) -> bool:
        if not super().matches(other) or not isinstance(other, Int4Linear) or other.group != self.group:
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    def stacked(self, others: Sequence[Any]) -> Self:
        parts = (self, *others)
        bias = None if self.bias is None else torch.cat([part.bias.detach() for part in parts])
        weight, pairs = torch.cat([part.weight.detach() for part in parts]), torch.cat([part.pairs for part in parts], 1)
        return type(self)(weight, pairs, bias, self.kernels, self.order)

    def part(self, begin: int, end: int) -> Self:
        bias = None if self.bias is None else self.bias.detach()[begin:end]
        pairs = self.pairs[:, begin:end].contiguous()
        return type(self)(self.weight.detach()[begin // 8 : end // 8], pairs, bias, self.kernels, self.order)

    def numbers(self) -> torch.Tensor:
        wide = widen(self.weight.detach(), self.pairs).float()
        return wide if self.order is None else wide[:, self.order.argsort()]


def int4_linear(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bias: torch.Tensor | None, order: torch.Tensor | None = None
) -> Int4Linear:
    """Return a layer of codes [outputs, inputs] with scales and zero points [outputs, groups]; `unsupported` must be empty for it."""
    repeats = scale.shape[1]
    group = codes.shape[1] // scale.shape[1]
    fine = next(size for size in GROUPS if group % size == 0)
    pairs = scales_and_zeros(scale, zero).repeat_interleave(group // fine, 0, output_size=repeats * (group // fine))
    return Int4Linear(pack(codes), pairs, bias, kernels(codes.device), order)


def unsupported(outputs: int, inputs: int, groups: int) -> str:
    """Return why the kernel cannot take a weight with so many groups of inputs; empty if it can."""
    if outputs % 8:
        return f"{outputs} outputs are no multiple of 8"
    if not tiles_of(inputs):
        return f"{inputs} inputs are no multiple of 32"
    if inputs % groups or (inputs // groups) % GROUPS[-1]:
        return f"groups of {inputs / groups:g} inputs are no multiples of 32"
    return ""


def int4_problem(device: torch.device) -> str:
    """Return why `device` does not multiply weights of 4 bits right; empty if it does."""
    if device.type != "cuda":
        return "the kernel is for GPUs"
    if (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        return f"the GPU's compute capability is {found[0]}.{found[1]}, and the kernel needs {CAPABILITY[0]}.{CAPABILITY[1]}"
    return trial_problem(device)


def trial_problem(device: torch.device) -> str:
    """Return what is wrong with products of all ways on `device`; empty if nothing is."""
    drawn = torch.Generator().manual_seed(6)
    try:
        for inputs, group in ((384, 128), (320, 64)):
            layer = _sample(device, inputs, group, kernels(device))
            rows = torch.randn(MANY + 1, inputs, generator=drawn).to(torch.bfloat16).to(device)
            want = rows.float() @ layer.numbers().T
            for count in (3, ROWS, MANY + 1):
                off = ((layer(rows[:count]).float() - want[:count]).norm() / want[:count].norm()).item()
                if not off <= OFF:
                    return f"its products of {count} rows are {off:.1%} off"
    except Exception as error:  # of torch: a build without the kernel, or another layout
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no reason given'}"
    return ""


def _sample(device: torch.device, inputs: int, group: int, kernels: Kernels) -> Int4Linear:
    drawn = torch.Generator().manual_seed(inputs)
    codes = torch.randint(0, 16, (24, inputs), generator=drawn).to(torch.uint8).to(device)
    scale = (0.5 + torch.rand(24, inputs // group, generator=drawn)).to(device)
    zero = torch.randint(0, 16, (24, inputs // group), generator=drawn).to(device)
    return Int4Linear(pack(codes), scales_and_zeros(scale, zero), None, kernels)


@torch.inference_mode()
def compile_int4(model: nn.Module) -> None:
    """Compile Triton's kernels for the layers of `model`, by one product for each of their forms, so that no step waits for a compiler."""
    layers = [layer for layer in model.modules() if isinstance(layer, Int4Linear)]
    for layer in {(layer.out_features, layer.in_features, layer.group): layer for layer in layers}.values():
        for count in (16, 32, 64, MANY + 1):
            layer(torch.zeros(count, layer.in_features, dtype=layer.dtype, device=layer.device))


def keep_int4(model: nn.Module) -> int:
    """Replace layers of `model` whose weight is torchao's int4 tensor in this layout, in place; return how many.

    torchao's tensor is not stacked, and multiplies many rows by the kernel for few. It fills inputs up to a multiple of 1,024.
    """
    made = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            weight: Any = getattr(layer, "weight", None)
            if type(layer) is not nn.Linear or not hasattr(weight, "scale_and_zero"):
                continue
            outputs, inputs = weight.shape
            if not outputs % 8 and not inputs % (TILE * 8):
                qdata, pairs = weight.qdata[:, : inputs // (TILE * 8)], weight.scale_and_zero[: inputs // weight.block_size[-1]]
                setattr(parent, name, Int4Linear(qdata.contiguous(), pairs.contiguous(), layer.bias, kernels(weight.device)))
                made += 1
    return made
