"""Float8 checkpoints in blocks, as DeepSeek's and Qwen's (`quant_method: fp8`), that stay in 8 bits on a GPU.

transformers reads them into its own modules, whose kernels it would fetch at run time. Ours take the place of these modules. Where a GPU
cannot multiply the weights, transformers dequantizes them while it reads, as on a CPU.
"""

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from fairlead_worker.model.fp8_layers import TILE, multiplies
from fairlead_worker.model.lowbit.linear import Fp8BlockLinear, widened
from fairlead_worker.model.lowbit.rows import FLOAT8, GROUP, dequantized, rounder

logger = logging.getLogger(__name__)

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
OFF = 0.02
"""How far a product may be from one of the rounded numbers in float32, over its norm: sums have 14 bits on compute capability 9.0."""


def keeps_fp8(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, ranks: int) -> bool:
    """Return whether the layers of a checkpoint can stay in 8 bits here; the log says why not."""
    given = config.quantization_config
    if given["quant_method"] != "fp8" or device.type != "cuda":
        return False
    reason = reason_against(config, dtype, ranks) or problem_of(device)
    if reason:
        logger.warning("float8 weights are widened to %s: %s", str(dtype)[6:], reason)
    return not reason


def reason_against(config: PreTrainedConfig, dtype: torch.dtype, ranks: int) -> str:
    """Return why a checkpoint cannot stay in 8 bits on any GPU; empty if it can."""
    given, text = config.quantization_config, config.get_text_config(decoder=True)
    blocks = given.get("weight_block_size")
    if dtype != torch.bfloat16:
        return "products of float8 are for --dtype bfloat16"
    if blocks is None:
        return "it has one scale for each tensor; of such checkpoints those of compressed-tensors stay in 8 bits"
    if list(blocks) != [GROUP, GROUP]:
        return f"its blocks are of {blocks[0]} by {blocks[1]}, and products are for {GROUP} by {GROUP}"
    if given.get("modules_to_convert") or given.get("expert_dtype", "fp8") != "fp8":
        return "it has other modules than linear layers in float8, or experts in 4 bits"
    if any(getattr(text, name, None) for name in EXPERTS):
        return "its experts have no kernel that reads them in blocks"
    if ranks > 1 and (odd := [size for size in _divided_sizes(text) if size % (GROUP * ranks)]):
        return f"{odd[0]} outputs or inputs of a layer on {ranks} ranks are no whole blocks of {GROUP}"
    return ""


def _divided_sizes(text: Any) -> list[int]:
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = (text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    return [*(count * dim for count in heads), text.intermediate_size]


def problem_of(device: torch.device) -> str:
    """Return why `device` does not multiply float8 in blocks right; empty if it does."""
    drawn = torch.Generator().manual_seed(5)
    weight = torch.randn(2 * GROUP, 3 * GROUP, generator=drawn).to(device).to(FLOAT8)
    scale = (1 + torch.rand(2, 3, generator=drawn)).to(device)
    inputs = torch.randn(5, 3 * GROUP, generator=drawn).to(torch.bfloat16).to(device)
    try:
        if not multiplies(weight):
            return "the GPU multiplies no float8 (compute capability below 8.9)"
        layer = Fp8BlockLinear(weight, scale, None, torch.bfloat16, rounder(device, True))
        want = dequantized(layer.rounder.round(inputs)) @ layer.numbers().T
        off = ((layer(inputs).float() - want).norm() / want.norm()).item()
    except Exception as error:  # of torch: a GPU, a CUDA or a cuBLAS that has no such product
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no reason given'}"
    return "" if off <= OFF else f"its products are {off:.1%} off"


def take_fp8(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace transformers' float8 layers of `model` in place; return how many stay in 8 bits. A layer of odd sizes is widened."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    kept = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, FP8Linear):
                made = _layer(layer, dtype)
                setattr(parent, name, made)
                kept += isinstance(made, Fp8BlockLinear)
    return kept


def _layer(layer: Any, dtype: torch.dtype) -> nn.Module:
    weight, scale = layer.weight.detach(), layer.weight_scale_inv.detach().float()
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    outputs, inputs = weight.shape
    if not outputs % TILE and not inputs % GROUP:
        return Fp8BlockLinear(weight, scale, bias, dtype, rounder(weight.device, True))
    with torch.device("meta"):
        plain = nn.Linear(inputs, outputs, bias=bias is not None)
    plain.weight = nn.Parameter(widened(weight, scale).to(dtype), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain
