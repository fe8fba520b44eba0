"""What linear layers with weights of fewer bits stand for: their numbers, an explicit computation with these, and a checkpoint of them."""

import json
import shutil
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fairlead_worker.model.layers.stack import Projections, Stack
from fairlead_worker.model.lowbit.experts import FOUR_BITS, MX_GROUP, ExpertWeights, Scales
from fairlead_worker.model.lowbit.linear import Fp8Linear, LowBitLinear
from fairlead_worker.model.lowbit.rows import GROUP

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448
"""Of float8's numbers."""
EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
ABOUT = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**EIGHT, "strategy": "channel", "dynamic": False},
            "input_activations": {**EIGHT, "strategy": "token", "dynamic": True},
        }
    },
}
"""The `quantization_config` of published `FP8-dynamic` checkpoints: a scale for each output, inputs rounded by each token's largest."""


IN_BLOCKS = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "activation_scheme": "dynamic"}
"""The `quantization_config` of Qwen3's and DeepSeek's checkpoints: a scale for 128 by 128 numbers, inputs rounded in blocks of 128."""


def save_float8(source: Path, folder: Path, device: torch.device, blocks: bool = False) -> Path:
    """The checkpoint in `source` with its linear layers' weights in float8; in bfloat16 their scales too, as published ones have them."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            if not path.name.startswith("model.safetensors"):  # an index: here all is in one file
                shutil.copy(path, folder)
            continue
        with safe_open(path, framework="pt", device=str(device)) as stored:
            for name in stored.keys():  # noqa: SIM118  # no mapping
                tensor = stored.get_tensor(name)
                if not name.endswith("_proj.weight"):
                    tensors[name] = tensor
                    continue
                if blocks:
                    grid = tensor.float().view(tensor.shape[0] // GROUP, GROUP, -1, GROUP).abs().amax((1, 3)) / LARGEST
                    scale = grid.to(torch.bfloat16)
                    wide = scale.float().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
                else:
                    scale = (tensor.float().abs().amax(1, keepdim=True) / LARGEST).to(torch.bfloat16)
                    wide = scale.float()
                tensors[name] = (tensor.float() / wide).clamp(-LARGEST, LARGEST).to(FLOAT8)
                tensors[f"{name}_scale_inv" if blocks else f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": IN_BLOCKS if blocks else ABOUT}))
    return folder


def narrow_experts(weight: torch.Tensor, scales: Scales) -> ExpertWeights:
    """Weights [experts, outputs, inputs] in few bits."""
    experts, outputs, inputs = weight.shape
    run = {Scales.BLOCKS: (GROUP, GROUP), Scales.ROWS: (1, inputs), Scales.GROUPS: (1, MX_GROUP)}[scales]
    grid = weight.float().view(experts, outputs // run[0], run[0], inputs // run[1], run[1])
    largest = grid.abs().amax((2, 4), keepdim=True)
    if scales is Scales.GROUPS:
        exponent = (largest / FOUR_BITS[-1]).log2().ceil()
        steps = torch.tensor([(low + high) / 2 for low, high in pairwise(FOUR_BITS)], device=weight.device)
        bits = torch.bucketize((grid / exponent.exp2()).abs(), steps) + 8 * (grid < 0)
        pairs = bits.view(experts, outputs, -1, 2)
        values = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
        return ExpertWeights(values, (exponent + 127).to(torch.uint8).view(experts, outputs, -1), scales)
    scale = largest / LARGEST
    values = (grid / scale).clamp(-LARGEST, LARGEST).to(FLOAT8).view(weight.shape)
    shape = (experts, outputs // GROUP, inputs // GROUP) if scales is Scales.BLOCKS else (experts, outputs)
    return ExpertWeights(values, scale.view(shape), scales)


Narrow = nn.Linear | LowBitLinear


def narrow_layers(model: PreTrainedModel) -> dict[str, Narrow]:
    """Those whose weight is in few bits; of a stack, each part by its own name."""
    ordinary, found = (torch.Tensor, nn.Parameter), dict[str, Narrow]()
    for path, part in model.named_modules():
        if isinstance(part, Projections) and isinstance(part.whole, Stack) and isinstance(stacked := part.whole.linear, LowBitLinear):
            ends = list(accumulate(part.whole.sizes))
            for name, begin, end in zip(part.PARTS, [0, *ends], ends, strict=False):
                found[f"{path}.{name}"] = stacked.part(begin, end)
        elif (isinstance(part, LowBitLinear) and not path.endswith("_proj.linear")) or (
            isinstance(part, nn.Linear) and type(part.weight) not in ordinary
        ):
            found[path] = part
    return found


def parts_of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that a library's kind consists of; of a plain one, itself."""
    if not hasattr(weight, "__tensor_flatten__"):
        return {"weight": weight}
    names, _ = weight.__tensor_flatten__()
    return {name: getattr(weight, name) for name in names}


def held_bytes(layer: Narrow) -> int:
    if isinstance(layer, LowBitLinear):
        return sum(part.nbytes for name, part in (*layer.named_parameters(), *layer.named_buffers()) if name != "bias")
    return sum(part.nbytes for part in parts_of(layer.weight).values())


def rounds(layer: Narrow) -> bool:
    """Whether it makes its inputs float8 too."""
    return isinstance(layer, Fp8Linear) or getattr(layer.weight, "act_quant_kwargs", None) is not None


@torch.inference_mode()
def numbers(layer: Narrow) -> torch.Tensor:
    """[outputs, inputs] float32: what its weight stands for. Of int4, whose layout is its kernel's own, by way of that kernel: rows of the
    identity, in bfloat16."""
    if isinstance(layer, LowBitLinear):
        return layer.numbers()
    held: Any = layer.weight
    if hasattr(held, "scale_and_zero"):
        identity = torch.eye(layer.in_features, dtype=torch.bfloat16, device=held.device)
        return nn.functional.linear(identity, held).T.float()
    wide: torch.Tensor = held.qdata.float() * held.scale.float()
    return wide


def by_token(inputs: torch.Tensor, blocks: bool = False) -> torch.Tensor:
    """[..., inputs], each token rounded to float8 by its largest, or by the largest of each 128, as float32."""
    grouped = inputs.float().reshape(*inputs.shape[:-1], -1, GROUP if blocks else inputs.shape[-1])
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return ((grouped / scale).clamp(-LARGEST, LARGEST).to(FLOAT8).float() * scale).view(inputs.shape)


class Explicit:
    """The model in float32 on transformers' own attention, to be given other numbers."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        # transformers asks for `accelerate` here: with it nothing goes through the host, on which numbers would be widened slowly.
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": device}).float().eval()
        self._rounds = self._blocks = False
        found = {path: part for path, part in self._model.named_modules() if isinstance(part, nn.Linear) and path.endswith("_proj")}
        self.layers = list(found)
        for part in found.values():
            part.register_forward_pre_hook(self._round)

    def weight(self, path: str) -> torch.Tensor:
        weight: torch.Tensor = self._model.get_parameter(f"{path}.weight").data
        return weight

    def take(self, layers: Mapping[str, Narrow]) -> None:
        """Their numbers in the place of its own."""
        for path, layer in layers.items():
            self.weight(path).copy_(numbers(layer))

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor, rounded: bool = False, blocks: bool = False) -> torch.Tensor:
        """[tokens, vocabulary] of `tokens` [n]. rounded: inputs of the layers' products are made float8 by token, or in blocks."""
        self._rounds, self._blocks = rounded, blocks
        said: torch.Tensor = self._model(input_ids=tokens[None], use_cache=False).logits[0]
        return said.float()

    def _round(self, module: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (by_token(given[0], self._blocks), *given[1:]) if self._rounds else given
