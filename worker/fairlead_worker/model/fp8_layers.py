"""Linear layers of float8 checkpoints that stay in 8 bits: torchao's tensor around the checkpoint's own numbers and scales.

Nothing is rounded again. There are two forms. Either inputs become float8 too, with a scale for each token, and the GPU multiplies
the two. Or the weight is dequantized for each product, which saves no time: on a CPU a token takes 170 times as long through such a
layer of 2,048 by 2,048 as through the dequantized and packed one (48 ms, 0.3 ms). So the first form is used wherever possible, the
second only on request.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ROWWISE_FP8 = (8, 9)
"""Compute capability from which GPUs multiply float8: Ada and Hopper."""
LEAST = 1e-12
"""Lower bound of a token's largest input: a token of zeros must give zeros, not 0 / 0."""
TILE = 16
"""The kernels need numbers of inputs and of outputs that are multiples of this."""


def can_retain(scheme: Any) -> bool:
    """Return whether a layer with this compressed-tensors scheme can stay in 8 bits.

    Its weight must be float8 with one scale, or one for each output. Its inputs must be unrounded, or rounded by each token's largest
    one. torchao's tensor has no fixed scale for inputs.
    """
    weights, inputs = scheme.weights, scheme.input_activations
    if weights is None or scheme.output_activations is not None or not _float8(weights) or weights.strategy not in ("channel", "tensor"):
        return False
    return inputs is None or (_float8(inputs) and inputs.dynamic is True and inputs.strategy == "token")


def _float8(numbers: Any) -> bool:
    return numbers.type == "float" and numbers.num_bits == 8 and bool(numbers.symmetric)


def multiplies(weight: torch.Tensor) -> bool:
    """Return whether the device of `weight` [outputs, inputs] multiplies float8 of that size."""
    on_gpu = weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) >= ROWWISE_FP8
    return on_gpu and not any(size % TILE for size in weight.shape)


@contextmanager
def exact_scales(family: type[PreTrainedModel], wanted: bool) -> Iterator[None]:
    """Read scales of a `family` checkpoint as float32 inside this context, instead of rounding them to the computing dtype."""
    if not wanted:
        yield
        return
    # transformers' attribute for sensitive parameters; some families set their own.
    own = "_keep_in_fp32_modules_strict" in family.__dict__
    previous = family._keep_in_fp32_modules_strict
    family._keep_in_fp32_modules_strict = [*(previous or ()), "weight_scale"]
    try:
        yield
    finally:
        if own:
            family._keep_in_fp32_modules_strict = previous
        else:
            del family._keep_in_fp32_modules_strict


def retain_fp8(model: PreTrainedModel, dtype: torch.dtype, everywhere: bool) -> int:
    """Make layers of `model` compute in `dtype` with their compressed-tensors weights, in place; return how many.

    everywhere: also layers whose weight is then dequantized for each product, and whose inputs are not rounded.
    """
    sites = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear) and _site(model, path, module)}
    forms = {path: _rounds_tokens(module, dtype) for path, module in sites.items()}
    chosen = [path for path, rounds in forms.items() if rounds or everywhere]
    if not chosen:
        return 0
    if find_spec("torchao") is None:
        logger.warning("float8 weights are widened to %s: to keep them in 8 bits takes the package torchao", str(dtype)[6:])
        return 0
    from compressed_tensors.quantization import QuantizationMetadata

    for path in chosen:
        layer = sites[path]
        weight, scale = layer.weight.data, layer.get_parameter("weight_scale").data
        QuantizationMetadata.clear_quantization(layer)
        layer.weight = nn.Parameter(wrap_fp8(weight, scale, dtype, forms[path]), requires_grad=False)
    logger.info("%d linear layers stay in 8 bits, %d of them multiplied so", len(chosen), sum(forms[path] for path in chosen))
    return len(chosen)


def wrap_fp8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, rounds: bool) -> torch.Tensor:
    """Wrap a float8 weight [outputs, inputs] and its scale (one, or [outputs, 1]) as one tensor of numbers in `dtype`.

    The weight is not copied. rounds: products with it round inputs to float8, each token by its largest input.
    """
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Float8Tensor, PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    outputs, inputs = weight.shape
    weight = weight.contiguous()  # a copy only if it was cut: products need contiguous weights
    rows = scale.float().reshape(-1, 1).expand(outputs, 1).contiguous()
    made: torch.Tensor
    if not rounds:
        made = Float8Tensor(weight, rows, block_size=[1, inputs], dtype=dtype)
        return made
    usual = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())  # the settings of --quantization fp8
    preference = usual.kernel_preference
    made = Float8Tensor(
        weight,
        rows,
        block_size=[1, inputs],
        mm_config=usual.mm_config,
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(torch.float8_e4m3fn, PerRow(), hp_value_lb=LEAST, kernel_preference=preference),
        kernel_preference=preference,
        dtype=dtype,
    )
    return made


def _site(model: PreTrainedModel, path: str, module: nn.Linear) -> bool:
    """Return whether the layer can stay in 8 bits. The head cannot (it may be the embedding too), nor can experts, which may see no
    token of a step.
    """
    scheme = getattr(module, "quantization_scheme", None)
    if scheme is None or type(module) is not nn.Linear or module is model.get_output_embeddings() or ".experts." in path:
        return False
    return can_retain(scheme) and module.weight.dtype == torch.float8_e4m3fn


def _rounds_tokens(layer: nn.Linear, dtype: torch.dtype) -> bool:
    """Return whether `layer` rounds its inputs and can multiply float8: products with row scales exist only for bfloat16."""
    scheme: Any = layer.quantization_scheme
    return scheme.input_activations is not None and dtype == torch.bfloat16 and multiplies(layer.weight)
