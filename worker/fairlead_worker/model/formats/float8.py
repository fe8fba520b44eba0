"""Float8 checkpoints (`quant_method: fp8`): in blocks, as DeepSeek's and Qwen's, or with a scale for each tensor, as AutoFP8's.

On a GPU that multiplies float8 their layers stay so. Elsewhere they are widened: on a CPU a token takes 170 times as long through a layer
of 2,048 by 2,048 that is widened for each product as through the widened and packed one (48 ms, 0.3 ms).
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from fairlead_worker.model.formats.base import Format, Parts, Pending, Target, group_layers, plain_linear
from fairlead_worker.model.lowbit.choose import choose_rounder
from fairlead_worker.model.lowbit.experts import unpack_float4
from fairlead_worker.model.lowbit.linear import CAPABILITY, TILE, Fp8BlockLinear, Fp8Linear, multiplies, widen
from fairlead_worker.model.lowbit.rows import FLOAT8, GROUP, dequantized
from fairlead_worker.sharding.scales import Groups

NO_PRODUCT = "the GPU multiplies no float8 (compute capability below 8.9)"
OFF = 0.02
"""How far a product may be from one of the rounded numbers in float32, over its norm: sums have 14 bits on compute capability 9.0."""
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
"""Names of a weight's scale: of DeepSeek V3, AutoFP8, DeepSeek V4 and Mistral Large 4."""
INPUT_SCALES = ("input_scale", "activation_scale")


class Float8(Format):
    """Weights in float8 with a scale for each block, or one. Fixed scales of inputs (AutoFP8's `static`) are not used: a token's own clips
    nothing.
    """

    method = "fp8"
    needed = dict.fromkeys(("weight_scale_inv", "weight_scale"), ("weight",))  # the loader finds weights without a scale

    def __init__(self, config: Any, names: Collection[str]) -> None:
        given = config.quantization_config
        self.blocks: tuple[int, int] | None = tuple(given["weight_block_size"]) if given.get("weight_block_size") else None
        self._given, self._text = given, config.get_text_config(decoder=True)
        super().__init__(find_weights(names))

    @property
    def groups(self) -> Groups:
        """Return which numbers share a scale. Weights that are widened may be cut within a block."""
        outputs, inputs = self.blocks or (0, 0)
        return Groups(frozenset({outputs} - {0}), frozenset({inputs} - {0}), widened=not self.keeps)

    def reason_to_widen(self, target: Target) -> str:
        if target.capability is None:
            return "CPUs multiply no float8"
        if target.dtype != torch.bfloat16:
            return "products of float8 are for --dtype bfloat16"
        if self.blocks and self.blocks != (GROUP, GROUP):
            return f"its blocks are of {self.blocks[0]} by {self.blocks[1]}, and products are for {GROUP} by {GROUP}"
        if self._given.get("modules_to_convert"):
            return "it has other modules than linear layers in float8"
        if self.blocks and target.ranks > 1 and (odd := [size for size in _divided_sizes(self._text) if size % (GROUP * target.ranks)]):
            return f"{odd[0]} outputs or inputs of a layer on {target.ranks} ranks are no whole blocks of {GROUP}"
        return "" if target.capability >= CAPABILITY else NO_PRODUCT

    def find_problem(self, device: torch.device) -> str:
        return find_problem(device, self.blocks is not None)

    def size_problem(self, outputs: int, inputs: int) -> str:
        unit = GROUP if self.blocks else TILE
        return f"{outputs} outputs and {inputs} inputs are no multiples of {TILE} and {unit}" if outputs % TILE or inputs % unit else ""

    def widen(self, weight: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        values = parts["weight"]
        if values.dtype in (torch.int8, torch.uint8, torch.float4_e2m1fn_x2):  # experts of DeepSeek V4 in float4
            values = unpack_float4(values.view(torch.uint8))
        return widen(values, parts["scale"], self.blocks or (0, 0)).to(dtype)

    def layer(self, weight: str, layer: Pending, parts: Parts, dtype: torch.dtype) -> nn.Module:
        values, scale = parts["weight"], parts["scale"].float()
        outputs, inputs = values.shape
        if not self.keeps or self.size_problem(outputs, inputs) or values.dtype != FLOAT8:
            return plain_linear(self.widen(weight, parts, dtype), layer.bias)
        bias = None if layer.bias is None else layer.bias.detach().to(dtype)
        if self.blocks:
            return Fp8BlockLinear(values.contiguous(), scale, bias, dtype, choose_rounder(values.device, True))
        return Fp8Linear(values.contiguous(), scale.view(1, 1).repeat(outputs, 1), bias, dtype, choose_rounder(values.device))


def find_weights(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the tensors of each weight with a scale beside it: the two, and scales of inputs."""
    found = {}
    for layer, parts in group_layers(names).items():
        if "weight" in parts and (scale := next((parts[name] for name in SCALES if name in parts), None)) is not None:
            found[f"{layer}.weight"] = {"weight": parts["weight"], "scale": scale}
            found[f"{layer}.weight"] |= {part: parts[part] for part in INPUT_SCALES if part in parts}
    return found


def find_problem(device: torch.device, blocks: bool = True) -> str:
    """Return why `device` does not multiply float8, in blocks or by rows, right; empty if it does."""
    drawn = torch.Generator().manual_seed(5)
    weight = torch.randn(2 * GROUP, 3 * GROUP, generator=drawn).to(device).to(FLOAT8)
    scale = (1 + torch.rand(*((2, 3) if blocks else (2 * GROUP, 1)), generator=drawn)).to(device)
    inputs = torch.randn(5, 3 * GROUP, generator=drawn).to(torch.bfloat16).to(device)
    try:
        if not multiplies(weight):
            return NO_PRODUCT
        layer = (Fp8BlockLinear if blocks else Fp8Linear)(weight, scale, None, torch.bfloat16, choose_rounder(device, blocks))
        want = dequantized(layer.rounder.round(inputs)) @ layer.numbers().T
        off = ((layer(inputs).float() - want).norm() / want.norm()).item()
    except Exception as error:  # of torch: a GPU, a CUDA or a cuBLAS that has no such product
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no reason given'}"
    return "" if off <= OFF else f"its products are {off:.1%} off"


def _divided_sizes(text: Any) -> list[int]:
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = (text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    inner = (getattr(text, name, 0) for name in ("intermediate_size", "shared_expert_intermediate_size"))  # a model may have one alone
    return [*(count * dim for count in heads), *inner]
