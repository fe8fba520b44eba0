"""Tiny quantized checkpoints, made in place, each with the plain numbers that it represents."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.models import save_model
from transformers import Mxfp4Config, PreTrainedModel

GROUP = 32
Made = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors by the last part of their names, and the weight that they represent."""


def fp8(weight: torch.Tensor) -> Made:
    """A scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    small = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale}, small.float() * scale


def fp8_of_tensors(weight: torch.Tensor) -> Made:
    """One scale for the weight, and one for all inputs: fixed, and so large that no input is clipped."""
    scale = weight.abs().max().view(1) / 448
    small = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale, "input_scale": torch.tensor([0.25])}, small.float() * scale


def fp8_with_one_scale(weight: torch.Tensor) -> Made:
    parts, plain = fp8_of_tensors(weight)
    return {name: tensor for name, tensor in parts.items() if name != "input_scale"}, plain


def int8(weight: torch.Tensor) -> Made:
    scale = weight.abs().amax(1, keepdim=True) / 127
    small = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {"weight": small, "weight_scale": scale}, small.float() * scale


def int4(weight: torch.Tensor) -> Made:
    groups = weight.view(weight.shape[0], -1, GROUP)
    scale = groups.abs().amax(2) / 7
    small = (groups / scale[:, :, None]).round().clamp(-8, 7)
    parts = {"weight_packed": packed(small.flatten(1)), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return parts, (small * scale[:, :, None]).view_as(weight)


def int4_with_zeros(weight: torch.Tensor) -> Made:
    groups = weight.view(weight.shape[0], -1, GROUP)
    least, most = groups.aminmax(dim=2)
    scale = (most - least) / 15
    zero = (-8 - least / scale).round().clamp(-8, 7)
    small = (groups / scale[:, :, None] + zero[:, :, None]).round().clamp(-8, 7)
    parts = {"weight_packed": packed(small.flatten(1)), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    parts["weight_zero_point"] = packed(zero.T).T
    return parts, ((small - zero[:, :, None]) * scale[:, :, None]).view_as(weight)


def packed(small: torch.Tensor) -> torch.Tensor:
    """Pack [rows, n] of -8 to 7 -> [rows, n / 8] words."""
    nibbles = (small.reshape(small.shape[0], -1, 8) + 8).to(torch.int64)
    words = (nibbles << torch.arange(0, 32, 4)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def awq(weight: torch.Tensor) -> Made:
    """AutoAWQ's `gemm`: words of 8 outputs in an order of their own, a zero point for each group."""
    small, scale, zero = _with_zeros(weight, GROUP)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = [_words(part.T.unflatten(1, (-1, 8))[..., order].flatten(1)) for part in (small, zero)]
    return {"qweight": words[0], "qzeros": words[1], "scales": scale.T.half()}, _plain(small, scale, zero, GROUP)


def gptq(
    zero_offset: int = 1, bits: int = 4, group: int = GROUP, order: Callable[[int], torch.Tensor] | None = None
) -> Callable[[torch.Tensor], Made]:
    """AutoGPTQ's `gptq`, whose zero points are stored less one, or `gptq_v2`. order: of the inputs that groups are made of."""

    def make(weight: torch.Tensor) -> Made:
        inputs = weight.shape[1]
        each = group if group > 0 else inputs
        place = torch.arange(inputs) if order is None else order(inputs)
        small, scale, zero = _with_zeros(weight[:, place], each, bits)
        groups = torch.empty(inputs, dtype=torch.int32)
        groups[place] = (torch.arange(inputs) // each).to(torch.int32)
        plain = _plain(small, scale, zero, each)[:, place.argsort()]
        words = _words(small[:, place.argsort()], bits).T
        zeros = _words((zero.T - zero_offset), bits)
        return {"qweight": words, "qzeros": zeros, "scales": scale.T.half(), "g_idx": groups}, plain

    return make


def _with_zeros(weight: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [outputs, inputs], and scales (of float16) and zero points from 1 on [outputs, groups]."""
    groups = weight.unflatten(1, (-1, group))
    least, most = groups.aminmax(dim=2)
    scale = ((most - least) / (2**bits - 1)).half().float()
    zero = (-least / scale).round().clamp(1, 2**bits - 1).to(torch.int64)
    small = (groups / scale[:, :, None] + zero[:, :, None]).round().clamp(0, 2**bits - 1).to(torch.int64)
    return small.flatten(1), scale, zero


def _plain(small: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int) -> torch.Tensor:
    return (small - zero.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)


def _words(small: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Pack [rows, n] of 0 to 2**bits - 1 -> [rows, n * bits / 32] words."""
    words = (small.unflatten(1, (-1, 32 // bits)) << torch.arange(0, 32, bits)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def shuffled(count: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))


def blocks(rows: int, columns: int, scale_name: str) -> Callable[[torch.Tensor], Made]:
    """Float8 in blocks of that size."""

    def make(weight: torch.Tensor) -> Made:
        grid = weight.view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
        scale = grid.abs().amax((1, 3)) / 448
        small = (grid / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        plain = small.float() * scale[:, None, :, None]
        return {"weight": small.view_as(weight), scale_name: scale}, plain.view_as(weight)

    return make


@dataclass(frozen=True)
class Form:
    """How weights are made, and the matching part of config.json."""

    make: Callable[[torch.Tensor], Made]
    about: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's own config."""
    family: str = "llama"


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors."""
    scheme = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights}
    if inputs is not None:
        scheme["input_activations"] = {"symmetric": True} | inputs
    about = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head", "re:.*gate$"]}
    return about | {"config_groups": {"group_0": scheme}}


EIGHT = {"num_bits": 8, "type": "float"}
FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}
IN_ORDER: dict[str, Form] = {
    "AWQ": Form(awq, AWQ),
    "GPTQ": Form(gptq(), GPTQ),
    "GPTQ, its second format": Form(gptq(0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "GPTQ in 8 bits": Form(gptq(bits=8), GPTQ | {"bits": 8}),
}
"""Forms that `lowbit.stored` reads, and ranks divide."""
ACT_ORDER = Form(gptq(order=shuffled), GPTQ | {"desc_act": True})
WHOLE_ROWS = Form(gptq(group=-1), GPTQ | {"group_size": -1})
FORMS: dict[str, Form] = IN_ORDER | {
    "float8, a scale for each output": Form(fp8, compressed("float-quantized", EIGHT | {"strategy": "channel"})),
    "int4 in groups": Form(int4, compressed("pack-quantized", FOUR)),
    "int4 in groups with zero points": Form(int4_with_zeros, compressed("pack-quantized", FOUR | {"symmetric": False})),
    "float8 in blocks of compressed-tensors": Form(
        blocks(16, 32, "weight_scale"), compressed("float-quantized", EIGHT | {"strategy": "block", "block_structure": [16, 32]})
    ),
    "float8, a scale for each tensor": Form(fp8_of_tensors, {"quant_method": "fp8", "activation_scheme": "static"}),
    "float8 in blocks": Form(blocks(16, 32, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [16, 32]}),
}
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
DYNAMIC = Form(int8, compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, TOKEN | {"type": "int"}))
"""Forms whose inputs are rounded too, by the largest input of each token."""
TOKEN_FP8 = compressed("float-quantized", EIGHT | {"strategy": "channel"}, TOKEN | {"type": "float"})
KEPT = {
    "a scale for each output": FORMS["float8, a scale for each output"],
    "a scale for each output, inputs rounded": Form(fp8, TOKEN_FP8),
    "a scale for each tensor": Form(fp8_with_one_scale, compressed("float-quantized", EIGHT | {"strategy": "tensor"})),
}
"""Forms whose linear layers can stay in 8 bits."""
STATIC = Form(
    fp8_of_tensors, compressed("float-quantized", EIGHT | {"strategy": "tensor"}, EIGHT | {"strategy": "tensor", "dynamic": False})
)
"""Forms whose inputs are rounded too, by a scale in the checkpoint."""


def save_quantized(form: Form, folder: Path) -> PreTrainedModel:
    """Write a model of `form`; return it with the plain numbers."""
    model = save_model(form.family, folder, **form.changes)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, plain = form.make(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in parts.items()}
        _set(model, name, plain)
    save_file(tensors, path, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": form.about}))
    return model


def _set(model: PreTrainedModel, name: str, plain: torch.Tensor) -> None:
    """Return the weight called `name` in a checkpoint; an expert's weight is part of a parameter."""
    layer, experts, rest = name.partition(".experts.")
    if not experts:
        model.get_parameter(name).data.copy_(plain)
        return
    expert, projection = rest.split(".")[:2]
    stacked = model.get_parameter(f"{layer}.experts.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}").data[int(expert)]
    half = plain.shape[0]
    part = {"gate_proj": stacked[:half], "up_proj": stacked[half:], "down_proj": stacked}[projection]
    part.copy_(plain)


def save_mxfp4(folder: Path, **overrides: Any) -> PreTrainedModel:
    """Save a gpt-oss as it is published, with experts in MXFP4; return it as transformers reads it, in float32."""
    model = save_model("gpt_oss", folder, **overrides)
    file = folder / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(121, 125, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    asked = {"quantization_config": Mxfp4Config(dequantize=True), "attn_implementation": "eager", "dtype": torch.float32}
    read: PreTrainedModel = type(model).from_pretrained(folder, **asked)
    return read.eval()
