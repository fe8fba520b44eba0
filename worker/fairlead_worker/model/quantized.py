"""Weights of fewer bits: checkpoints that come so, and weights that are made so while they are read. The numbers are the libraries' own.

Layers with such weights are left as they are: neither stacked nor packed, for both would take the weights apart.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from fairlead_worker.model.errors import ModelLoadError

LIBRARIES = {"compressed-tensors": "compressed-tensors", "torchao": "torchao", "awq": "gptqmodel", "gptq": "gptqmodel", "fp8": "accelerate"}
"""`quant_method` of a checkpoint -> the package that reads it, through transformers."""
ROWWISE_FP8 = (8, 9)
"""Compute capability from which GPUs multiply float8: Ada and Hopper."""


def check_checkpoint(uri: str, method: str, ranks: int) -> None:
    """Whether a checkpoint of this `quant_method` can be read here. Raises ModelLoadError."""
    if method not in LIBRARIES:
        known = ", ".join(sorted(LIBRARIES))
        raise ModelLoadError(
            uri, f"its weights are quantized ({method}), which is not supported; use one of {known}, or unquantized weights"
        )
    if ranks > 1:
        raise ModelLoadError(uri, f"its weights are quantized ({method}), and those are not divided: leave out --tensor-parallel {ranks}")
    _need(uri, f"its weights are quantized ({method})", LIBRARIES[method])


def made_at_load(uri: str, quantization: str, device: torch.device, ranks: int) -> dict[str, Any]:
    """Arguments of `from_pretrained` for `--quantization fp8` or `int4`; {} for others. Raises ModelLoadError."""
    wanted = f"--quantization {quantization}"
    if ranks > 1 and quantization != "none":  # scales of a part are not those of the whole
        raise ModelLoadError(uri, f"{wanted} goes with one device: leave out --tensor-parallel {ranks}, or the quantization")
    if quantization not in ("fp8", "int4"):
        return {}
    if quantization == "int4" and device.type == "cpu":
        raise ModelLoadError(uri, f"{wanted} is for GPUs, and this is a CPU: int8 is what CPUs have")
    _need(uri, wanted, "torchao")
    _need(uri, wanted, "accelerate")
    from torchao import quantization as torchao
    from transformers import TorchAoConfig

    if quantization == "int4":
        # Of groups of 128 inputs, in the layout that torch's own kernel reads.
        kind = torchao.Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) >= ROWWISE_FP8:
        # A scale for each row: what a row computes does not depend on who shares its step.
        kind = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
    else:
        kind = torchao.Float8WeightOnlyConfig()
    return {"quantization_config": TorchAoConfig(kind), "device_map": {"": device}}


def read_plainly(config: PreTrainedConfig) -> None:
    """Has float8 in blocks (DeepSeek's and Qwen's) read as plain weights: transformers' kernels for it are fetched at run time."""
    given = config.quantization_config
    if given["quant_method"] == "fp8":
        config.quantization_config = {**given, "dequantize": True}


def plain(module: nn.Module) -> bool:
    """Its weight is a tensor like any other, and not a library's own kind."""
    return type(module.weight) in (torch.Tensor, nn.Parameter)


def _need(uri: str, what: str, package: str) -> None:
    if find_spec(package.replace("-", "_")) is None:
        extra = "; it comes with fairlead[gpu]" if package != "gptqmodel" else ""
        raise ModelLoadError(uri, f"{what}, which takes the package {package}, and that is not installed: pip install {package}{extra}")
