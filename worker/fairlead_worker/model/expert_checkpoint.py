"""Checkpoints whose experts stay in 8 or 4 bits on a GPU: which ones, and how transformers reads them so.

transformers stacks the weights of a layer's experts in one parameter, and dequantizes them meanwhile, unless the model has parameters for
the scales. So the model gets such parameters before it is read; then `LowBitExperts` takes their place.
"""

import logging
import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fairlead_worker.model.fp8_layers import ROWWISE_FP8, TILE
from fairlead_worker.model.fused.changes import Unfused
from fairlead_worker.model.fused.experts import activation_of, is_experts
from fairlead_worker.model.lowbit.checkpoint import count_experts
from fairlead_worker.model.lowbit.choose import choose_rounder, find_problem, load_triton_product
from fairlead_worker.model.lowbit.experts import MX_GROUP, ExpertWeights, LowBitExperts, Scales
from fairlead_worker.model.lowbit.rows import FLOAT8, GROUP

logger = logging.getLogger(__name__)

WEIGHT = re.compile(r"\.experts\.\d+\.(?:w[123]|gate_proj|up_proj|down_proj)\.weight(?:_packed)?$")
SUFFIXES = {"fp8": "_scale_inv", "compressed-tensors": "_scale"}
"""`quant_method` -> what follows the name of a weight in the name of its scales, where transformers reads them."""


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """How a checkpoint stores its experts."""

    suffix: str
    """One of `SUFFIXES`."""
    scales: Scales
    whole: bool = False
    """Whether a tensor has one scale, which each of its rows gets."""


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """Experts to keep, and how they multiply."""

    form: ExpertForm
    rounds: bool
    """Whether inputs are rounded to float8. Otherwise weights are widened inside of the kernel."""

    def leave_out(self, config: PreTrainedConfig) -> None:
        """Let transformers leave the experts alone when it puts its own float8 layers into the model."""
        given = config.quantization_config
        if given["quant_method"] == "fp8":
            left = given.get("modules_to_not_convert") or given.get("ignored_layers") or ["lm_head"]
            config.quantization_config = {**given, "modules_to_not_convert": [*left, ".experts"]}

    def model_class(self, whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """Return class `whole`, whose models have parameters for these experts."""

        def __init__(model: PreTrainedModel, config: PreTrainedConfig) -> None:
            whole.__init__(model, config)
            self.prepare(model)

        return type(whole.__name__, (whole,), {"__init__": __init__, "__module__": whole.__module__})

    def prepare(self, model: PreTrainedModel) -> None:
        """Give the experts of `model` (without weights, its parts already those of a rank) parameters in few bits, with scales."""
        for module in find_experts(model):
            for name in ("gate_up_proj", "down_proj"):
                weight: torch.Tensor = getattr(module, name)
                experts, outputs, inputs = weight.shape
                if self.form.scales is Scales.GROUPS:
                    delattr(module, name)
                    setattr(module, name, weight.new_empty(0))  # the family initializes it, although it is in no file
                    module.register_parameter(f"{name}_packed", _empty(weight, (experts, outputs, inputs // 2), torch.uint8))
                else:
                    module.register_parameter(name, _empty(weight, weight.shape, FLOAT8))
                shape, dtype = self._scales(experts, outputs, inputs, 2 if name == "gate_up_proj" else 1)
                module.register_parameter(f"{name}{self.form.suffix}", _empty(weight, shape, dtype))

    def take(self, model: PreTrainedModel) -> int:
        """Replace the experts of `model`, which was read, in place; return of how many layers."""
        taken = 0
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                if hasattr(module, f"gate_up_proj{self.form.suffix}"):
                    setattr(parent, name, self._made(module))
                    taken += 1
        return taken

    def _scales(self, experts: int, outputs: int, inputs: int, stacked: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of the scales of a weight that is `stacked` of a checkpoint's."""
        match self.form.scales:
            case Scales.GROUPS:
                return (experts, outputs, inputs // MX_GROUP), torch.uint8
            case Scales.BLOCKS:
                return (experts, ceil(outputs / GROUP), ceil(inputs / GROUP)), torch.float32
            case Scales.ROWS:
                return (experts, stacked) if self.form.whole else (experts, outputs, 1), torch.float32

    def _made(self, module: nn.Module) -> LowBitExperts:
        parts = [self._weights(module, name) for name in ("gate_up_proj", "down_proj")]
        rows = choose_rounder(parts[0].values.device, self.form.scales is Scales.BLOCKS) if self.rounds else None
        return LowBitExperts(parts[0], parts[1], activation_of(module), load_triton_product(), rows)

    def _weights(self, module: nn.Module, name: str) -> ExpertWeights:
        packed = "_packed" if self.form.scales is Scales.GROUPS else ""
        values, scale = (module.get_parameter(f"{name}{end}").detach() for end in (packed, self.form.suffix))
        if self.form.scales is Scales.ROWS:
            experts, outputs, _ = values.shape
            scale = scale.view(experts, -1)
            scale = scale.repeat_interleave(outputs // scale.shape[1], 1)
        return ExpertWeights(values, scale.contiguous(), self.form.scales)


def keep_experts(
    config: PreTrainedConfig, folder: Path, files: Iterable[str], dtype: torch.dtype, device: torch.device, ranks: int
) -> KeptExperts | None:
    """Return how the experts of a quantized checkpoint stay in few bits on `device`; None, with the reason in the log, if they cannot, or
    if it has none.
    """
    given, experts = config.quantization_config, count_experts(config.get_text_config(decoder=True))
    suffix = SUFFIXES.get(given["quant_method"])
    if device.type != "cuda" or suffix is None or not experts:
        return None
    form = find_form(folder, files, suffix)
    if isinstance(form, ExpertForm):
        multiplies = torch.cuda.get_device_capability(device) >= ROWWISE_FP8
        rounds = multiplies and _rounds_inputs(given)
        reason = reason_against(config, form, dtype, ranks) or find_problem(device, form.scales, rounds, experts)
        if not reason:
            if not multiplies:
                logger.warning("experts are widened in their kernel: the GPU multiplies no float8 (compute capability below 8.9)")
            return KeptExperts(form, rounds)
    else:
        reason = form
    logger.warning("experts are widened to %s: %s", str(dtype)[6:], reason)
    return None


def find_form(folder: Path, files: Iterable[str], suffix: str) -> ExpertForm | str:
    """Return how the files store the experts, with scales of this suffix; why these cannot stay in few bits, if so."""
    found: set[ExpertForm | str] = set()
    for name in files:
        with safe_open(folder / name, framework="pt") as stored:
            names = set(stored.keys())
            for key in filter(WEIGHT.search, names):
                found.add(_form(stored, key, suffix, names))
    if len(found) == 1:
        return found.pop()
    return "they are of several forms" if found else "their weights are in tensors of all experts, or of other names"


def _form(stored: Any, key: str, suffix: str, names: set[str]) -> ExpertForm | str:
    weight, key = stored.get_slice(key), key.removesuffix("_packed")
    if weight.get_dtype() not in ("F8_E4M3", "U8"):
        return f"their weights are {weight.get_dtype()}, neither float8 (e4m3) nor MXFP4"
    scale = next((name for name in (f"{key}{suffix}", f"{key}_scale") if name in names), None)  # AutoFP8 calls it the second
    if scale is None:
        return f"their scales are not beside them, as weight{suffix}"
    outputs, inputs = weight.get_shape()
    shape, kind = tuple(stored.get_slice(scale).get_shape()), stored.get_slice(scale).get_dtype()
    if weight.get_dtype() == "U8":
        if kind == "U8" and shape == (outputs, 2 * inputs // MX_GROUP):
            return ExpertForm(suffix, Scales.GROUPS)
        return f"4-bit weights of {outputs} by {2 * inputs} have scales of {kind} {shape}"
    if shape == (ceil(outputs / GROUP), ceil(inputs / GROUP)):
        return ExpertForm(suffix, Scales.BLOCKS)
    if shape == (outputs, 1):
        return ExpertForm(suffix, Scales.ROWS)
    if shape in ((), (1,)):
        return ExpertForm(suffix, Scales.ROWS, whole=True)
    return f"a weight of {outputs} by {inputs} has scales of {shape}"


def reason_against(config: PreTrainedConfig, form: ExpertForm, dtype: torch.dtype, ranks: int) -> str:
    """Return why experts of this form cannot stay in few bits on any GPU; empty if they can."""
    if dtype != torch.bfloat16:
        return "products of experts in few bits are for --dtype bfloat16"
    if form.scales is Scales.GROUPS and _rounds_inputs(config.quantization_config):
        return "the inputs of experts in MXFP4 are rounded in groups, which no kernel here does"
    plain = deepcopy(config)
    del plain.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain, dtype=dtype)
    modules = find_experts(model)
    if not modules:
        return "its layers have no experts of gate, up and down in three parameters"
    unit = {Scales.BLOCKS: GROUP, Scales.ROWS: TILE, Scales.GROUPS: MX_GROUP}[form.scales]
    for module in modules:
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
        if width % unit or inner % (unit * ranks):
            return f"{width} inputs, and {inner} inner values on {ranks} rank{'s' * (ranks > 1)}, are no multiples of {unit}"
        try:
            activation_of(module)
        except Unfused as reason:
            return str(reason)
    return ""


def _rounds_inputs(given: dict[str, Any]) -> bool:
    """Return whether a checkpoint's inputs are float8 too. Fixed scales of inputs are not used: a token's own scale clips nothing."""
    groups = given.get("config_groups", {}).values()
    return all(group.get("input_activations") is not None for group in groups)


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules of experts of `model`."""
    return [module for module in model.modules() if is_experts(module)]


def _empty(like: torch.Tensor, shape: Iterable[int], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=like.device), requires_grad=False)
