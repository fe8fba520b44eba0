"""Which layers of a quantized checkpoint stay in few bits on a GPU, and how large they are in its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fairlead_worker.check.gpus import Gpu
from fairlead_worker.model import expert_checkpoint
from fairlead_worker.model.expert_checkpoint import SUFFIXES, ExpertForm, find_form
from fairlead_worker.model.fp8_layers import ROWWISE_FP8, can_retain
from fairlead_worker.model.loader import LoadPlan
from fairlead_worker.model.lowbit import checkpoint, int4, stored
from fairlead_worker.model.lowbit.checkpoint import count_experts
from fairlead_worker.model.quantized import checkpoint_schemes, packing_of
from fairlead_worker.sharding.weights import open_tensors

BYTES: Mapping[str, int] = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes of a number in safetensors; 1 for others."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Layers that stay as their files have them."""

    description: str = "none"
    """Quantization of the weights as they will be held."""
    linears: Mapping[str, int] = field(default_factory=dict)
    """Layer, from the list of layers on -> bytes of its tensors."""
    experts: Mapping[str, int] | None = None
    """Module of a layer's experts, likewise; None: they are widened, or there are none."""
    dtype: torch.dtype | None = None
    """In which products are computed, if it follows from the weights."""

    odd: Callable[[int, int], bool] = lambda outputs, inputs: False
    """Whether a layer of these sizes is widened, because no kernel takes it."""

    def linear(self, path: str, outputs: int, inputs: int) -> int | None:
        """Return the bytes of a linear layer that stays in few bits; None for others. outputs, inputs: of this rank's part."""
        return None if self.odd(outputs, inputs) else self.linears.get(stored.relative(path))

    def experts_of(self, path: str) -> int | None:
        return None if self.experts is None else self.experts.get(stored.relative(path))


def find_kept(uri: str, folder: Path, plan: LoadPlan, gpu: Gpu | None, dtype: str, quantization: str, ranks: int) -> Kept:
    """Return what stays in few bits on `gpu` (None: on a CPU). dtype: of `--dtype`. Raises ModelLoadError."""
    given: dict[str, Any] | None = getattr(plan.config, "quantization_config", None)
    if given is None:
        return Kept(plan.native_quantization if plan.native_quantization != "none" else quantization)
    method, name = given["quant_method"], str(plan.dtype).removeprefix("torch.")
    if gpu is None:
        return Kept(f"{method} in its files, widened to {name}")
    linears, experts = _stored_bytes(folder, plan.files)
    multiplies = gpu.capability >= ROWWISE_FP8
    keeps_experts, reason = False, ""
    if method in SUFFIXES and count_experts(plan.config.get_text_config(decoder=True)):
        form = find_form(folder, plan.files, SUFFIXES[method])
        keeps_experts = isinstance(form, ExpertForm) and not expert_checkpoint.reason_against(plan.config, form, plan.dtype, ranks)
    packing = packing_of(uri, plan.config)
    computed = None
    if packing is not None:
        quantized = stored.stored_names(uri, folder, plan.files, packing)
        reason = stored.reason_to_widen(uri, packing, quantized, dtype)
        if not reason and gpu.capability < int4.CAPABILITY:
            reason = f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        linears = {layer: size for layer, size in linears.items() if layer in quantized}
        computed = None if reason else torch.bfloat16
    elif method == "fp8":
        reason = checkpoint.reason_against(plan.config, plan.dtype, ranks, keeps_experts)
        reason = reason or ("" if multiplies else f"{gpu.name} multiplies no float8")
    elif method == "compressed-tensors":
        schemes = checkpoint_schemes(given)
        retained = [can_retain(scheme) and (quantization == "fp8" or scheme.input_activations is not None) for scheme in schemes]
        if not all(retained) or (quantization != "fp8" and not (multiplies and plan.dtype == torch.bfloat16)):
            reason = "no product here takes them as they are"
    elif method == "mxfp4":
        reason = "experts in MXFP4 have no product in gpt-oss's layout"

    def odd(outputs: int, inputs: int) -> bool:
        if packing is not None:
            return bool(int4.unsupported(outputs, inputs, packing.groups(inputs)))
        return method == "fp8" and checkpoint.is_odd(outputs, inputs, bool(given.get("weight_block_size")))

    if reason:
        linears = {}
    described = f"{method}, kept" if linears else f"{method} in its files, widened to {name}: {reason}"
    if keeps_experts and not linears:
        described = f"{method}: experts kept, other layers widened to {name}"
    return Kept(described, linears, experts if keeps_experts else None, computed, odd)


def _stored_bytes(folder: Path, files: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of each quantized linear layer outside of experts, and of all experts of each layer."""
    sizes: dict[str, int] = {}
    quantized = set[str]()
    with open_tensors(folder, files) as tensors:
        for key, tensor in tensors.items():
            layer, _, name = key.rpartition(".")
            size = BYTES.get(tensor.get_dtype(), 1)
            for length in tensor.get_shape():
                size *= length
            layer = stored.relative(layer)
            sizes[layer] = sizes.get(layer, 0) + size
            if name not in ("weight", "bias"):
                quantized.add(layer)
    experts: dict[str, int] = {}
    for layer in [layer for layer in sizes if ".experts." in layer]:
        module = layer[: layer.index(".experts.")] + ".experts"
        module = module.replace(".block_sparse_moe.", ".mlp.")  # of Mixtral's checkpoints
        experts[module] = experts.get(module, 0) + sizes.pop(layer)
    return {layer: size for layer, size in sizes.items() if layer in quantized}, experts
