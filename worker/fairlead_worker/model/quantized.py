"""Quantized weights: checkpoints that are stored quantized, and weights that are quantized while they are read. The libraries define the
numbers.

Layers with such weights are neither stacked nor packed, because both would take the weights apart.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import CompressedTensorsConfig, PreTrainedConfig, PreTrainedModel

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.fp8_layers import LEAST, ROWWISE_FP8, can_retain, exact_scales, retain_fp8
from fairlead_worker.model.lowbit.checkpoint import about_reading
from fairlead_worker.model.lowbit.stored import Packing, packing_of_config, packing_of_schemes
from fairlead_worker.sharding.scales import Groups

logger = logging.getLogger(__name__)

LIBRARIES = {"compressed-tensors": "compressed-tensors", "torchao": "torchao", "awq": "", "gptq": "", "fp8": "accelerate", "mxfp4": ""}
"""`quant_method` of a checkpoint -> the package that reads it, through transformers; none: `lowbit.stored` or transformers alone does."""
DIVIDED = ("compressed-tensors", "fp8", "awq", "gptq")
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
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) >= ROWWISE_FP8:
        # A scale for each row: a row's result does not depend on the other rows of its step.
        kind = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow(), activation_value_lb=LEAST)
    else:
        kind = torchao.Float8WeightOnlyConfig()
    return {"quantization_config": TorchAoConfig(kind), "device_map": {"": device}}


def made_bytes(quantization: str) -> Callable[[int, int], int] | None:
    """Return (outputs, inputs) -> bytes of a linear layer that `quantize_arguments` makes on a GPU; None if it makes none.

    fp8: a float32 scale for each output. int4: scale and zero point in bfloat16 for each group.
    """
    sizes: Mapping[str, Callable[[int, int], int]] = {
        "fp8": lambda outputs, inputs: outputs * (inputs + 4),
        "int4": lambda outputs, inputs: outputs * (inputs // 2 + 4 * -(-inputs // INT4_GROUP)),
    }
    return sizes.get(quantization)


def read_arguments(uri: str, config: PreTrainedConfig, keeps: bool) -> dict[str, Any]:
    """Return arguments of `from_pretrained` for a quantized checkpoint, and request dequantization where it cannot be read otherwise.

    That holds for float8 in blocks (DeepSeek's and Qwen's), whose kernels transformers would fetch at run time, unless our layers keep
    it (`lowbit.checkpoint`); for gpt-oss's experts in MXFP4, likewise; and for packed integers with zero points, for which
    compressed-tensors reserves no memory. Raises ModelLoadError.
    """
    given = config.quantization_config
    try:
        zeros = [given.get("format") == "pack-quantized" and not each.weights.symmetric for each in checkpoint_schemes(given)]
    except ValueError as error:
        raise ModelLoadError(uri, f"its quantization_config cannot be read: {' '.join(str(error).split())}") from error
    if keeps:
        config.quantization_config = about_reading(given)
    elif given["quant_method"] in ("fp8", "mxfp4") or zeros == [True]:
        # With several layer kinds, all of them would be dequantized like the first one.
        config.quantization_config = {**given, "dequantize": True}
    # AutoFP8's checkpoints have a scale for each tensor, under another name.
    return {"key_mapping": {r"\.weight_scale$": ".weight_scale_inv"}} if given["quant_method"] == "fp8" else {}


def packing_of(uri: str, config: PreTrainedConfig) -> Packing | None:
    """Return how the checkpoint's weights are packed, if `lowbit.stored` can read them; None if it cannot. Raises ModelLoadError."""
    given = config.quantization_config
    if given["quant_method"] == "compressed-tensors":
        return packing_of_schemes(given.get("format"), checkpoint_schemes(given))
    if given["quant_method"] == "mxfp4":
        return None
    return packing_of_config(uri, given)


def ignore_kv_scheme(config: PreTrainedConfig) -> None:
    """Drop the scheme of the KV cache from `config`: compressed-tensors would round inside the attention, whatever the cache's dtype is.

    Checkpoints that quantize nothing else are ordinary ones then.
    """
    given = getattr(config, "quantization_config", None)
    if not given or not given.get("kv_cache_scheme"):
        return
    config.quantization_config = {**given, "kv_cache_scheme": None}
    if not given.get("config_groups"):
        del config.quantization_config


def checkpoint_schemes(given: dict[str, Any]) -> list[Any]:
    """Return the scheme of each layer group with quantized weights in a compressed-tensors checkpoint; [] for other checkpoints."""
    if given["quant_method"] != "compressed-tensors":
        return []
    schemes = CompressedTensorsConfig.from_dict(given).quantization_config
    return [] if schemes is None else [scheme for scheme in schemes.config_groups.values() if scheme.weights is not None]


def check_stored(uri: str, quantization: str, config: PreTrainedConfig) -> None:
    """Check that `--quantization` suits a quantized checkpoint: only fp8 does, if its layers can stay in 8 bits. Raises ModelLoadError."""
    if quantization == "none":
        return
    if quantization != "fp8" or not any(map(can_retain, checkpoint_schemes(config.quantization_config))):
        raise ModelLoadError(uri, f"its weights are quantized already: leave out --quantization {quantization}")
    _need(uri, f"--quantization {quantization}", "torchao")


def groups_of(config: PreTrainedConfig, quantization: str) -> Groups:
    """Return which outputs and inputs share a scale, by the checkpoint's `config` or by `--quantization`."""
    if quantization == "int4":
        return Groups(made=INT4_GROUP)
    given = getattr(config, "quantization_config", {})
    match given.get("quant_method"):
        case "fp8":
            outputs, inputs = given.get("weight_block_size") or (0, 0)
            return Groups(_sizes(outputs), _sizes(inputs), widened=given.get("dequantize", True))
        case "awq" | "gptq":
            return Groups(inputs=_sizes(int(given.get("group_size", 128))), act_order=bool(given.get("desc_act")))
        case "compressed-tensors":
            weights = [each.weights for each in checkpoint_schemes(given)]
            blocks = [each.block_structure for each in weights if each.block_structure]
            return Groups(
                _sizes(*(block[0] for block in blocks)),
                _sizes(*(block[1] for block in blocks), *(each.group_size or 0 for each in weights)),
            )
    return Groups()


def _sizes(*sizes: int) -> frozenset[int]:
    return frozenset(size for size in sizes if size > 0)  # a group size of -1 means a whole row


@contextmanager
def read_alone(config: PreTrainedConfig, family: type[PreTrainedModel]) -> Iterator[None]:
    """Read a quantized checkpoint into a model of class `family`, independently of the other ranks, inside this context.

    compressed-tensors divides its work over all ranks that it finds and exchanges the results, as if all ranks read the same layers.
    But ranks read different parts, and only rank 0 reads a draft model.
    """
    given = getattr(config, "quantization_config", {})
    if given.get("quant_method") != "compressed-tensors":
        yield
        return
    from compressed_tensors.offload import as_single_threaded

    # Scales of other schemes have their own dtypes.
    with as_single_threaded(), exact_scales(family, all(map(can_retain, checkpoint_schemes(given)))):
        yield


def dequantize(model: PreTrainedModel, dtype: torch.dtype, retain: bool) -> None:
    """Dequantize the weights of compressed-tensors to `dtype`, layer after layer, in place, except layers that stay in 8 bits
    (`retain_fp8`).

    retain: also keep layers in 8 bits whose weight is dequantized for each product. compressed-tensors would dequantize by itself before
    the first forward pass. It would also install its own storage behind each module, which sends the weights of one rank to the others.
    """
    hook = getattr(model, "ct_decompress_hook", None)
    if hook is None:
        return
    from compressed_tensors.compressors import decompress_module
    from compressed_tensors.quantization import QuantizationMetadata

    hook.remove()
    del model.ct_decompress_hook
    if not retain_fp8(model, dtype, retain) and retain:
        logger.warning("--quantization fp8: no layer of this checkpoint can stay in 8 bits (experts and the head cannot); all are widened")
    for module in model.modules():
        if isinstance(scale := getattr(module, "weight_scale", None), nn.Parameter) and scale.dtype == torch.float32:
            scale.data = scale.data.to(dtype)  # the widened weight gets its scale's dtype
        decompress_module(module)
        if hasattr(module, "quantization_scheme") and not _rounds(module):  # it is an ordinary layer now
            QuantizationMetadata.clear_quantization(module)


def round_by_token(model: PreTrainedModel) -> None:
    """Let layers whose inputs compressed-tensors rounds take packed rows [T, inputs]: only in [1, T, inputs] has each token its scale."""

    def by_token(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda inputs: forward(inputs[None])[0] if inputs.dim() == 2 else forward(inputs)

    for module in filter(_rounds, model.modules()):
        module.forward = by_token(module.forward)


def _rounds(module: nn.Module) -> bool:
    """Return whether compressed-tensors rounds the layer's inputs or outputs, which it also does after its weight is dequantized."""
    scheme: Any = getattr(module, "quantization_scheme", None)
    return scheme is not None and (scheme.input_activations is not None or scheme.output_activations is not None)


def is_plain(module: nn.Module) -> bool:
    """Return whether the layer's weight is an ordinary tensor, not a library's own type, and its output depends on nothing else."""
    return type(getattr(module, "weight", None)) in (torch.Tensor, nn.Parameter) and not _rounds(module)


def _need(uri: str, what: str, package: str) -> None:
    if find_spec(package.replace("-", "_")) is None:
        raise ModelLoadError(
            uri,
            f"{what}, which needs the package {package}, and that is not installed: pip install {package}; it comes with fairlead[gpu]",
        )
