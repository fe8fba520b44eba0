"""Experts of a layer in a constant number of kernels: rows sorted by expert, two grouped products, and the activation in one kernel.

Nothing depends on how many rows an expert has, so a step neither waits for the device nor leaves a CUDA graph. transformers' own grouped
form takes 18 kernels for the same, most of them to sort, to count and to put rows back.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from fairlead_worker.model.acceptance import find_refusal
from fairlead_worker.model.exact import widened
from fairlead_worker.model.fuse import sample_input
from fairlead_worker.model.fused.gated import activation_of
from fairlead_worker.model.fused.library import Library
from fairlead_worker.model.fused.patch import Patch, Unfused
from fairlead_worker.model.lowbit.experts import find_route, sum_choices
from fairlead_worker.model.lowbit.rows import Activation


@dataclass(frozen=True, slots=True, eq=False)
class GroupedExperts:
    """The forward of a module of experts."""

    gate_up: torch.Tensor
    """[experts, 2 * inner, width]"""
    down: torch.Tensor
    """[experts, width, inner]"""
    activate: Activation
    numbers: torch.Tensor
    """0 to the number of experts, exclusive, int64."""

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return [T, width] for tokens [T, width], their experts [T, choices] and the weights of these."""
        order, ends = find_route(top_k_index, self.numbers)
        both = functional.grouped_mm(hidden_states[order // top_k_index.shape[1]], self.gate_up.transpose(1, 2), offs=ends)
        answers = functional.grouped_mm(self.activate(both), self.down.transpose(1, 2), offs=ends)
        return sum_choices(torch.empty_like(answers).index_copy_(0, order, answers), top_k_weights)


def has_experts(model: nn.Module) -> bool:
    return any(map(is_experts, model.modules()))


def expert_patches(model: PreTrainedModel, library: Library) -> list[Patch]:
    """Return patches of every module of experts, each compared with its own forward. Raises Unfused."""
    return [_patch(module, library) for module in model.modules() if is_experts(module)]


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the weights of all experts of a layer, in transformers' form."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(weight, torch.Tensor) and weight.dim() == 3 for weight in weights)


@torch.inference_mode()
def _patch(module: nn.Module, library: Library) -> Patch:
    named: Any = module
    name = type(module).__name__
    if getattr(named, "is_transposed", False) or getattr(named, "has_bias", False) or not getattr(named, "has_gate", True):
        raise Unfused(f"{name} has biases, no gate, or transposed weights")
    up, down = named.gate_up_proj.detach(), named.down_proj.detach()
    experts, width, inner = down.shape
    if up.shape != (experts, 2 * inner, width):
        raise Unfused(f"{name} has weights of {tuple(up.shape)} and {tuple(down.shape)}")
    numbers = torch.arange(experts, device=up.device)
    forward = GroupedExperts(up, down, getattr(library, activation_of(module)), numbers)
    inputs = sample_input(width, down)[0]
    choices = min(2, experts)
    index = torch.arange(len(inputs) * choices, device=up.device).view(-1, choices) * 7 % experts
    weights = torch.full(index.shape, 1 / choices, dtype=inputs.dtype, device=up.device)
    with widened(module):
        exact = module(inputs.float(), index, weights.float())
    if refusal := find_refusal(forward(inputs, index, weights), module(inputs, index, weights), exact):
        raise Unfused(f"{name}: {refusal}")
    return Patch(module, forward)
