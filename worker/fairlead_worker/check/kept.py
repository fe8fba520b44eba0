"""Which layers of a quantized checkpoint stay in few bits on a GPU, and how large they are in its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from fairlead_worker.check.gpus import Gpu
from fairlead_worker.model.formats.base import Target, count_experts
from fairlead_worker.model.formats.choose import read_format
from fairlead_worker.model.formats.experts import METHODS, KeptExperts, find_kept_experts
from fairlead_worker.model.plan import LoadPlan
from fairlead_worker.sharding.shards import relative
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

    odd: Callable[[int, int], str] = lambda outputs, inputs: ""
    """Why a layer of these sizes is widened: no kernel takes it."""

    def linear(self, path: str, outputs: int, inputs: int) -> int | None:
        """Return the bytes of a linear layer that stays in few bits; None for others. outputs, inputs: of this rank's part."""
        return None if self.odd(outputs, inputs) else self.linears.get(relative(path))

    def experts_of(self, path: str) -> int | None:
        return None if self.experts is None else self.experts.get(relative(path))


def find_kept(uri: str, folder: Path, plan: LoadPlan, gpu: Gpu | None, dtype: str, quantization: str, ranks: int) -> Kept:
    """Return what stays in few bits on `gpu` (None: on a CPU). dtype: of `--dtype`. Raises ModelLoadError."""
    given: dict[str, Any] | None = getattr(plan.config, "quantization_config", None)
    if given is None:
        return Kept(plan.native_quantization if plan.native_quantization != "none" else quantization)
    method, name = given["quant_method"], str(plan.dtype).removeprefix("torch.")
    target = Target(plan.dtype, None if gpu is None else gpu.capability, dtype, quantization, ranks)
    with open_tensors(folder, plan.files, plan.rename) as tensors:
        form = read_format(uri, plan.config, tensors, quantization)
        linears, experts = _stored_bytes(tensors)
        found = None
        if gpu is not None and method in METHODS and count_experts(plan.config.get_text_config(decoder=True)):
            found = find_kept_experts(plan.config, tensors, target)
    if gpu is None:
        return Kept(f"{method} in its files, widened to {name}")
    if form is None:
        return Kept(f"{method}, kept", linears)
    reason = form.reason_to_widen(target)
    linears = {} if reason else {layer: size for layer, size in linears.items() if layer in form.layers}
    described = f"{method}, kept" if linears else f"{method} in its files, widened to {name}: {reason}"
    if (keeps_experts := isinstance(found, KeptExperts)) and not linears:
        described = f"{method}: experts kept, other layers widened to {name}"
    return Kept(described, linears, experts if keeps_experts else None, None if reason else form.computes, form.size_problem)


def _stored_bytes(tensors: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of each quantized linear layer outside of experts, and of all experts of each layer. tensors: slices."""
    sizes: dict[str, int] = {}
    quantized = set[str]()
    for key, tensor in tensors.items():
        layer, _, name = key.rpartition(".")
        layer = relative(layer)
        sizes[layer] = sizes.get(layer, 0) + BYTES.get(tensor.get_dtype(), 1) * prod(tensor.get_shape())
        if name not in ("weight", "bias"):
            quantized.add(layer)
    experts: dict[str, int] = {}
    for layer in [layer for layer in sizes if ".experts." in layer]:
        module = layer[: layer.index(".experts.")] + ".experts"
        module = module.replace(".block_sparse_moe.", ".mlp.")  # of Mixtral's checkpoints
        experts[module] = experts.get(module, 0) + sizes.pop(layer)
    return {layer: size for layer, size in sizes.items() if layer in quantized}, experts
