"""Linear layers that a LoRA adapter may touch."""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from fairlead_worker.model.layers.stack import Stack
from fairlead_worker.model.trial import TRIAL_TOKENS, trial_logits
from fairlead_worker.sharding.group import Gathered, Summed


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (in_features, out_features) of a module that acts as a linear layer; None for others."""
    inputs: Any = getattr(module, "in_features", None)
    outputs: Any = getattr(module, "out_features", None)
    return (int(inputs), int(outputs)) if inputs and outputs else None


def orders_of(model: PreTrainedModel, path: str) -> torch.Tensor | None:
    """Return the checkpoint's numbers of the outputs of the layer at `path`; None: they have the same order here."""
    parent, _, name = path.rpartition(".")
    return getattr(model.get_submodule(parent), "orders", {}).get(name)


def site_of(model: PreTrainedModel, path: str) -> nn.Module:
    """Return the module whose output an adapter of the layer at `path` is added to. Raises AttributeError if there is no such module.

    If ranks sum a layer's outputs, it is the layer before that sum, so that a single sum covers both.
    """
    module = model.get_submodule(path)
    return module.layer if isinstance(module, Summed) else module


def unsupported_reason(model: PreTrainedModel, path: str) -> str:
    """Return why no adapter can be on the module at `path`; empty if one can. Raises AttributeError if there is no such module."""
    module, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    if module is model.get_output_embeddings():
        return f"{path} is the model's head: adapters of lm_head are not served"
    if sizes_of(module) is None or isinstance(module, Stack) or isinstance(parent, Stack | Summed | Gathered):
        return f"{path} is no linear layer of the model (but {type(module).__name__})"
    if ".experts." in path:  # an expert sees some of a step's tokens, and only its parent knows which ones
        return f"{path} is of one expert: adapters of experts are not served"
    return ""


def adaptable_layers(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return `sizes_of` of all layers that an adapter may touch: those that see every token of a step once."""
    sites = {path: module for path, module in model.named_modules() if not unsupported_reason(model, path)}
    seen: dict[str, list[int]] = {path: [] for path in sites}

    def watch(path: str, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(lambda _, inputs, answer: seen[path].append(inputs[0].numel() // inputs[0].shape[-1]))

    handles = [watch(path, module) for path, module in sites.items()]
    try:
        trial_logits(model)
    finally:
        for handle in handles:
            handle.remove()
    sizes = {path: sizes_of(module) for path, module in sites.items()}
    return {path: found for path, found in sizes.items() if found is not None and seen[path] == [TRIAL_TOKENS]}
