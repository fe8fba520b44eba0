"""Float8 checkpoints (`quant_method: fp8`) that stay in 8 bits on a GPU: in blocks, as DeepSeek's and Qwen's, or with a scale for each
tensor, as AutoFP8's.

transformers reads them into its own modules, whose kernels it would fetch at run time. Ours take the place of these modules. Where a GPU
cannot multiply the weights, transformers dequantizes them while it reads, as on a CPU.
"""

import logging
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from fairlead_worker.model.fp8_layers import TILE, multiplies
from fairlead_worker.model.lowbit.choose import choose_rounder
from fairlead_worker.model.lowbit.linear import Fp8BlockLinear, Fp8Linear, widened
from fairlead_worker.model.lowbit.rows import FLOAT8, GROUP, dequantized

logger = logging.getLogger(__name__)

OFF = 0.02
"""How far a product may be from one of the rounded numbers in float32, over its norm: sums have 14 bits on compute capability 9.0."""


def keeps_fp8(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, ranks: int, keeps_experts: bool = False) -> bool:
    """Return whether the linear layers of a checkpoint can stay in 8 bits here; the log says why not.

    keeps_experts: whether its experts do. transformers widens all of a checkpoint or nothing.
    """
    given = config.quantization_config
    if given["quant_method"] != "fp8" or device.type != "cuda":
        return False
    reason = reason_against(config, dtype, ranks, keeps_experts) or find_problem(device, bool(given.get("weight_block_size")))
    if reason:
        logger.warning("float8 weights are widened to %s: %s", str(dtype)[6:], reason)
    return not reason


def reason_against(config: PreTrainedConfig, dtype: torch.dtype, ranks: int, keeps_experts: bool = False) -> str:
    """Return why a checkpoint cannot stay in 8 bits on any GPU; empty if it can."""
    given, text = config.quantization_config, config.get_text_config(decoder=True)
    blocks = given.get("weight_block_size")
    if dtype != torch.bfloat16:
        return "products of float8 are for --dtype bfloat16"
    if blocks and list(blocks) != [GROUP, GROUP]:
        return f"its blocks are of {blocks[0]} by {blocks[1]}, and products are for {GROUP} by {GROUP}"
    if given.get("modules_to_convert") or given.get("expert_dtype", "fp8") != "fp8":
        return "it has other modules than linear layers in float8, or experts in 4 bits"
    if count_experts(text) and not keeps_experts:
        return "its experts are widened"
    if blocks and ranks > 1 and (odd := [size for size in _divided_sizes(text) if size % (GROUP * ranks)]):
        return f"{odd[0]} outputs or inputs of a layer on {ranks} ranks are no whole blocks of {GROUP}"
    return ""


def count_experts(text: Any) -> int:
    """Return how many experts a layer of the model of config `text` has, if it has any."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(text, name, None))), 0)


def _divided_sizes(text: Any) -> list[int]:
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = (text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    return [*(count * dim for count in heads), text.intermediate_size]


def find_problem(device: torch.device, blocks: bool = True) -> str:
    """Return why `device` does not multiply float8, in blocks or by rows, right; empty if it does."""
    drawn = torch.Generator().manual_seed(5)
    weight = torch.randn(2 * GROUP, 3 * GROUP, generator=drawn).to(device).to(FLOAT8)
    scale = (1 + torch.rand(*((2, 3) if blocks else (2 * GROUP, 1)), generator=drawn)).to(device)
    inputs = torch.randn(5, 3 * GROUP, generator=drawn).to(torch.bfloat16).to(device)
    try:
        if not multiplies(weight):
            return "the GPU multiplies no float8 (compute capability below 8.9)"
        kind = Fp8BlockLinear if blocks else Fp8Linear
        layer = kind(weight, scale, None, torch.bfloat16, choose_rounder(device, blocks))
        want = dequantized(layer.rounder.round(inputs)) @ layer.numbers().T
        off = ((layer(inputs).float() - want).norm() / want.norm()).item()
    except Exception as error:  # of torch: a GPU, a CUDA or a cuBLAS that has no such product
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no reason given'}"
    return "" if off <= OFF else f"its products are {off:.1%} off"


def about_reading(given: dict[str, Any]) -> dict[str, Any]:
    """Return the `quantization_config` with which transformers reads a checkpoint that stays in 8 bits.

    Fixed scales of inputs (AutoFP8's `static`) are not read: a token's own scale clips nothing.
    """
    tensors = {"weight_block_size": None, "activation_scheme": "dynamic"}
    return {**given, "dequantize": False} | ({} if given.get("weight_block_size") else tensors)


def has_tensor_scales(config: PreTrainedConfig) -> bool:
    """Return whether the checkpoint has one scale for each tensor, as AutoFP8's have."""
    given = getattr(config, "quantization_config", {})
    return given.get("quant_method") == "fp8" and not given.get("weight_block_size")


class OneNumber:
    """A scale of one number in a file, read in another shape."""

    def __init__(self, tensor: Any, shape: tuple[int, ...]) -> None:
        self._tensor, self._shape = tensor, shape

    def __getitem__(self, index: object) -> torch.Tensor:
        made: torch.Tensor = self._tensor[index].reshape(self._shape)
        return made

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        kind: str = self._tensor.get_dtype()
        return kind


def reshape_scales(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tensors` with scales of one number in the shapes that transformers reads: of a layer a scalar, of an expert a vector, which
    it stacks. Files have either for both.
    """
    made = dict(tensors)
    for key, tensor in tensors.items():
        if key.endswith((".weight_scale", ".weight_scale_inv")) and prod(tensor.get_shape()) == 1:
            made[key] = OneNumber(tensor, (1,) if ".experts." in key else ())
    return made


def take_fp8(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace transformers' float8 layers of `model` in place; return how many stay in 8 bits. A layer of odd sizes is widened."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    kept = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, FP8Linear):
                made = _layer(layer, dtype)
                setattr(parent, name, made)
                kept += isinstance(made, Fp8Linear)
    return kept


def is_odd(outputs: int, inputs: int, blocks: bool) -> bool:
    """Return whether no product takes a layer of these sizes, which is widened then. blocks: whether its scales are of blocks."""
    return bool(outputs % TILE or inputs % (GROUP if blocks else TILE))


def _layer(layer: Any, dtype: torch.dtype) -> nn.Module:
    weight, scale = layer.weight.detach(), layer.weight_scale_inv.detach().float()
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    outputs, inputs = weight.shape
    blocks = layer.block_size is not None
    if not is_odd(outputs, inputs, blocks):
        kind = Fp8BlockLinear if blocks else Fp8Linear
        return kind(weight, scale if blocks else scale.view(1, 1).repeat(outputs, 1), bias, dtype, choose_rounder(weight.device, blocks))
    with torch.device("meta"):
        plain = nn.Linear(inputs, outputs, bias=bias is not None)
    plain.weight = nn.Parameter((widened(weight, scale) if blocks else weight.float() * scale).to(dtype), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain
