"""Which format a checkpoint's weights have, by its config.json; and weights that are quantized while they are read, by torchao."""

from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.formats.base import Format
from fairlead_worker.model.formats.compressed import CompressedTensors, can_stay
from fairlead_worker.model.formats.float8 import Float8
from fairlead_worker.model.formats.integers import PackedIntegers
from fairlead_worker.model.formats.mxfp4 import Mxfp4
from fairlead_worker.model.lowbit.linear import CAPABILITY, is_plain
from fairlead_worker.model.lowbit.rows import LEAST
from fairlead_worker.sharding.scales import Groups

LIBRARIES = {"compressed-tensors": "compressed-tensors", "torchao": "torchao", "awq": "", "gptq": "", "fp8": "", "mxfp4": ""}
"""`quant_method` of a checkpoint -> the package that it needs. transformers reads torchao's, and this folder all others."""
DIVIDED = ("compressed-tensors", "fp8", "awq", "gptq", "mxfp4")
"""Methods whose weights a rank can read in part. The layouts of the others are specific to their kernels."""
OF_QUANTIZED = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_packed", ".qweight")
"""Suffixes of tensors that exist only beside quantized weights. Without this check such weights would be read as plain ones."""
INT4_GROUP = 128
"""Inputs that share a scale if int4 is made at load for a GPU."""


def check_checkpoint(uri: str, method: str, ranks: int) -> None:
    """Check that a checkpoint of this `quant_method` can be read here. Raises ModelLoadError."""
    if method not in LIBRARIES:
        known = ", ".join(sorted(LIBRARIES))
        raise ModelLoadError(
            uri, f"its weights are quantized ({method}), which is not supported; use one of {known}, or unquantized weights"
        )
    if ranks > 1 and method not in DIVIDED:
        raise ModelLoadError(
            uri,
            f"its weights are quantized ({method}), which cannot be sharded: leave out --tensor-parallel-size {ranks}, or take "
            f"a checkpoint of {' or '.join(DIVIDED)}, or unquantized weights with --quantization",
        )
    if LIBRARIES[method]:
        _need(uri, f"its weights are quantized ({method})", LIBRARIES[method])


def read_format(uri: str, config: PreTrainedConfig, names: Collection[str], quantization: str) -> Format | None:
    """Return the format of a checkpoint with tensors of these names; None: its weights are ordinary, or transformers reads them (torchao).

    Raises ModelLoadError, also for a `--quantization` that does not suit a quantized checkpoint.
    """
    given: Mapping[str, Any] | None = getattr(config, "quantization_config", None)
    form: Format | None = None
    match given and given["quant_method"]:
        case "compressed-tensors":
            form = CompressedTensors(uri, config, names)
        case "fp8":
            form = Float8(config, names)
        case "awq" | "gptq":
            form = PackedIntegers(uri, config, names)
        case "mxfp4":
            form = Mxfp4(names)
    stays = quantization == "fp8" and isinstance(form, CompressedTensors) and any(map(can_stay, form.schemes))
    if given and quantization != "none" and not stays:
        raise ModelLoadError(uri, f"its weights are quantized already: leave out --quantization {quantization}")
    return form


def made_groups(quantization: str) -> Groups:
    """Return which inputs share a scale if `--quantization` makes them on a GPU."""
    return Groups(made=INT4_GROUP if quantization == "int4" else 0)


def ignore_kv_scheme(config: PreTrainedConfig) -> None:
    """Drop the scheme of the KV cache from `config`. Checkpoints that quantize nothing else are ordinary ones then, as those with null."""
    given = getattr(config, "quantization_config", None)
    if given and given.get("kv_cache_scheme"):
        config.quantization_config = {**given, "kv_cache_scheme": None}
        given = given.get("config_groups")
    if not given:
        config.__dict__.pop("quantization_config", None)


def quantize_arguments(uri: str, quantization: str, device: torch.device) -> dict[str, Any]:
    """Return arguments of `from_pretrained` for `--quantization fp8`, or `int4` on a GPU; {} for others. Raises ModelLoadError.

    Each rank of a sharded model quantizes its own part. A row's scale then covers the rank's inputs only, so it is equally fine or
    finer.
    """
    wanted = f"--quantization {quantization}"
    if quantization not in ("fp8", "int4") or (quantization == "int4" and device.type == "cpu"):
        return {}
    _need(uri, wanted, "torchao")
    _need(uri, wanted, "accelerate")
    from torchao import quantization as torchao
    from transformers import TorchAoConfig

    if quantization == "int4":
        # The layout that torch's own kernel reads.
        kind = torchao.Int4WeightOnlyConfig(group_size=INT4_GROUP, int4_packing_format="tile_packed_to_4d")
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY:
        # A scale for each row: a row's result does not depend on the other rows of its step.
        kind = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow(), activation_value_lb=LEAST)
    else:
        kind = torchao.Float8WeightOnlyConfig()
    return {"quantization_config": TorchAoConfig(kind), "device_map": {"": device}}


@torch.inference_mode()
def check_products(uri: str, model: nn.Module, dtype: torch.dtype) -> None:
    """Try a layer of each kind of weight that torchao has made. Raises ModelLoadError if the device has no product for it in `dtype`."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding) and not is_plain(module)]
    for kind, layer in {type(layer.weight).__name__: layer for layer in layers}.items():
        device = layer.weight.device
        tokens = torch.zeros(2, dtype=torch.int64, device=device)
        inputs = tokens if isinstance(layer, nn.Embedding) else tokens[:, None].expand(2, layer.in_features).to(dtype)
        try:
            layer(inputs)
        except Exception as error:  # of torch or torchao: NotImplementedError for an operator, or another type's own
            name = str(dtype).removeprefix("torch.")
            raise ModelLoadError(
                uri,
                f"its weights are quantized (torchao, {kind}), and torchao does not multiply them in {name} on {device.type.upper()}: "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; set --dtype to the checkpoint's, use the kind of device that "
                f"it was made for, or take a checkpoint of {' or '.join(DIVIDED)}",
            ) from error


def made_bytes(quantization: str) -> Callable[[int, int], int] | None:
    """Return (outputs, inputs) -> bytes of a linear layer that `quantize_arguments` makes on a GPU; None if it makes none.

    fp8: a float32 scale for each output. int4: scale and zero point in bfloat16 for each group.
    """
    sizes: Mapping[str, Callable[[int, int], int]] = {
        "fp8": lambda outputs, inputs: outputs * (inputs + 4),
        "int4": lambda outputs, inputs: outputs * (inputs // 2 + 4 * -(-inputs // INT4_GROUP)),
    }
    return sizes.get(quantization)


def _need(uri: str, what: str, package: str) -> None:
    if find_spec(package.replace("-", "_")) is None:
        raise ModelLoadError(
            uri,
            f"{what}, which needs the package {package}, and that is not installed: pip install {package}; it comes with fairlead[gpu]",
        )
