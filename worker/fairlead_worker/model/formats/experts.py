"""Experts of a checkpoint that stay in 8 or 4 bits on a GPU: how the files store them, and the modules that they become.

transformers stacks the weights of a layer's experts in two parameters. Here `LowBitExperts` takes the place of its module.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fairlead_worker.model.formats.base import Format, Target, count_experts, group_layers, replace_module
from fairlead_worker.model.fused.changes import Unfused
from fairlead_worker.model.fused.experts import activation_of, is_experts
from fairlead_worker.model.lowbit.choose import choose_rounder, find_problem, load_triton_product
from fairlead_worker.model.lowbit.experts import MX_GROUP, ExpertWeights, LowBitExperts, Scales
from fairlead_worker.model.lowbit.linear import CAPABILITY, TILE
from fairlead_worker.model.lowbit.rows import GROUP
from fairlead_worker.sharding.shards import relative

logger = logging.getLogger(__name__)

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123]|gate_proj|up_proj|down_proj)$")
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Mixtral's names -> others'."""
SCALES = ("weight_scale_inv", "weight_scale")
METHODS = ("fp8", "compressed-tensors")


class PendingExperts(nn.Module):
    """The experts of a layer before their weights are read. It cannot compute."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.activation, self.count = activation_of(module), len(module.down_proj)


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """Experts to keep, and how they multiply."""

    scales: Scales
    rounds: bool
    """Whether inputs are rounded to float8. Otherwise weights are widened inside of the kernel."""
    layers: Mapping[str, Mapping[tuple[int, str], Mapping[str, str]]] = field(default_factory=dict)
    """Module, from the list of layers on -> number and projection of an expert -> last part of a name -> name of a tensor."""

    @property
    def weights(self) -> list[str]:
        """Return the names of the weights."""
        stored = (parts for experts in self.layers.values() for parts in experts.values())
        return [f"{next(iter(parts.values())).rpartition('.')[0]}.weight" for parts in stored]

    def prepare(self, model: nn.Module) -> None:
        """Put a `PendingExperts` at each place of experts in `model`."""
        for path, module in find_experts(model):
            replace_module(model, path, PendingExperts(module))

    def place(self, model: PreTrainedModel, tensors: Mapping[str, Any]) -> None:
        """Replace the pending experts of `model`, in place. tensors: slices of this rank's parts."""
        pending = [(path, module) for path, module in model.named_modules() if isinstance(module, PendingExperts)]
        for path, module in pending:
            stored = self.layers[relative(path)]
            wanted = [(number, name) for name in PROJECTIONS.values() for number in range(module.count)]
            if missing := next((each for each in wanted if each not in stored), None):
                raise ValueError(f"{path}: the files have no {missing[1]} of expert {missing[0]}")
            gate, up, down = (
                [self._read(stored[number, name], tensors, model.device) for number in range(module.count)] for name in PROJECTIONS.values()
            )
            both = [[torch.cat(halves) for halves in zip(*pair, strict=True)] for pair in zip(gate, up, strict=True)]
            replace_module(model, path, self.make(self._stack(both), self._stack(down), module.activation))
        logger.info("the experts of %d layers stay in few bits", len(pending))

    def make(self, gate_up: ExpertWeights, down: ExpertWeights, activation: str) -> LowBitExperts:
        """Return the experts of a layer."""
        rows = choose_rounder(down.values.device, self.scales is Scales.BLOCKS) if self.rounds else None
        return LowBitExperts(gate_up, down, activation, load_triton_product(), rows)

    def _read(self, names: Mapping[str, str], tensors: Mapping[str, Any], device: torch.device) -> list[torch.Tensor]:
        """Return the weight of an expert and its scales."""
        stored = "weight" if "weight" in names else "weight_packed"
        values, scale = (tensors[names[part]][...].to(device) for part in (stored, _scale(names)))
        return [values, scale.float().reshape(-1).expand(len(values)) if self.scales is Scales.ROWS else scale]

    def _stack(self, each: list[Any]) -> ExpertWeights:
        values, scale = (torch.stack([expert[place] for expert in each]) for place in (0, 1))
        return ExpertWeights(values, scale if self.scales is Scales.GROUPS else scale.float(), self.scales)


def keep_experts(
    config: PreTrainedConfig, form: Format, tensors: Mapping[str, Any], target: Target, device: torch.device
) -> KeptExperts | None:
    """Return how the experts of a quantized checkpoint stay in few bits on `device`; None, with the reason in the log, if they cannot, or
    if it has none.
    """
    experts = count_experts(config.get_text_config(decoder=True))
    if target.capability is None or form.method not in METHODS or not experts:
        return None
    given = config.quantization_config
    kept = find_kept_experts(config, tensors, target)
    reason = kept if isinstance(kept, str) else find_problem(device, kept.scales, kept.rounds, experts)
    if reason or isinstance(kept, str):
        logger.warning("experts are widened to %s: %s", str(target.dtype)[6:], reason)
        return None
    if not kept.rounds and rounds_inputs(given):
        logger.warning("experts are widened in their kernel: the GPU multiplies no float8 (compute capability below 8.9)")
    return kept


def find_kept_experts(config: PreTrainedConfig, tensors: Mapping[str, Any], target: Target) -> KeptExperts | str:
    """Return the experts that can stay in few bits on any GPU of this capability; why they cannot, if so. tensors: slices of the files."""
    layers: dict[str, dict[tuple[int, str], dict[str, str]]] = {}
    for layer, parts in group_layers(tensors).items():
        if match := EXPERT.match(layer):
            module = relative(match[1]).replace(".block_sparse_moe.", ".mlp.")
            layers.setdefault(module, {})[int(match[2]), PROJECTIONS.get(match[3], match[3])] = parts
    found = {find_scales(tensors, parts) for experts in layers.values() for parts in experts.values()}
    if len(found) != 1:
        return "they are of several forms" if found else "their weights are in tensors of all experts, or of other names"
    scales = found.pop()
    if isinstance(scales, str):
        return scales
    rounded, multiplies = rounds_inputs(config.quantization_config), target.capability is not None and target.capability >= CAPABILITY
    return reason_against(config, scales, layers, target) or KeptExperts(scales, rounded and multiplies, layers)


def find_scales(tensors: Mapping[str, Any], parts: Mapping[str, str]) -> Scales | str:
    """Return what shares a scale of an expert's weight; why it cannot stay in few bits, if so."""
    stored = parts.get("weight") or parts.get("weight_packed")
    if stored is None:
        return "their weights have other names"
    weight = tensors[stored]
    if weight.get_dtype() not in ("F8_E4M3", "U8"):
        return f"their weights are {weight.get_dtype()}, neither float8 (e4m3) nor MXFP4"
    if not _scale(parts):
        return f"their scales are not beside them, as {' or '.join(SCALES)}"
    scale, (outputs, inputs) = tensors[parts[_scale(parts)]], weight.get_shape()
    shape = tuple(scale.get_shape())
    if weight.get_dtype() == "U8":
        fits = scale.get_dtype() == "U8" and shape == (outputs, 2 * inputs // MX_GROUP)
        return Scales.GROUPS if fits else f"4-bit weights of {outputs} by {2 * inputs} have scales of {scale.get_dtype()} {shape}"
    if shape == (ceil(outputs / GROUP), ceil(inputs / GROUP)):
        return Scales.BLOCKS
    return Scales.ROWS if shape in ((outputs, 1), (), (1,)) else f"a weight of {outputs} by {inputs} has scales of {shape}"


def reason_against(config: PreTrainedConfig, scales: Scales, layers: Mapping[str, Any], target: Target) -> str:
    """Return why experts with such scales cannot stay in few bits on any GPU; empty if they can."""
    if target.dtype != torch.bfloat16:
        return "products of experts in few bits are for --dtype bfloat16"
    if scales is Scales.GROUPS and rounds_inputs(config.quantization_config):
        return "the inputs of experts in MXFP4 are rounded in groups, which no kernel here does"
    plain = deepcopy(config)
    del plain.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain, dtype=target.dtype)
    modules = dict(find_experts(model))
    if not modules or {relative(path) for path in modules} != layers.keys():
        return "its layers have no experts of gate, up and down in three parameters"
    unit = {Scales.BLOCKS: GROUP, Scales.ROWS: TILE, Scales.GROUPS: MX_GROUP}[scales]
    for module in modules.values():
        named: Any = module
        experts, width, inner = named.down_proj.shape
        if named.gate_up_proj.shape != (experts, 2 * inner, width):
            return f"their weights are laid out as {tuple(named.gate_up_proj.shape)} and {tuple(named.down_proj.shape)}"
        usual = {"is_transposed": False, "has_bias": False, "has_gate": True, "is_concatenated": True}
        if other := [name for name, value in usual.items() if getattr(named, name, value) != value]:
            return f"{type(module).__name__} has {other[0]} = {getattr(named, other[0])}"
        gate = getattr(type(module), "_apply_gate", None)
        if gate is None or gate.__name__ != "_default_apply_gate" or getattr(named, "has_post_expert_norm", False):
            return f"{type(module).__name__} has a gate or a norm of its own"
        if width % unit or inner % (unit * target.ranks):
            ranks = f"{target.ranks} rank{'s' * (target.ranks > 1)}"
            return f"{width} inputs, and {inner} inner values on {ranks}, are no multiples of {unit}"
        try:
            activation_of(module)
        except Unfused as reason:
            return str(reason)
    return ""


def rounds_inputs(given: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's inputs are float8 too. Fixed scales of inputs are not used: a token's own scale clips nothing."""
    return all(group.get("input_activations") is not None for group in given.get("config_groups", {}).values())


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the experts of each layer."""
    return ((path, module) for path, module in list(model.named_modules()) if is_experts(module))


def _scale(names: Mapping[str, str]) -> str:
    return next((part for part in SCALES if part in names), "")
