"""Experts of a layer in a constant number of kernels: rows sorted by expert, two grouped products, and the activation in one kernel.

Nothing depends on how many rows an expert has, so a step neither waits for the device nor leaves a CUDA graph. transformers' own grouped
form takes 18 kernels for the same, most of them to sort, to count and to put rows back.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.model.acceptance import find_refusal, sample_input
from fairlead_worker.model.exact import widened
from fairlead_worker.model.fused.changes import Changes, Unfused
from fairlead_worker.model.fused.library import Library
from fairlead_worker.model.lowbit.experts import find_route, sum_choices
from fairlead_worker.model.lowbit.rows import ACTIVATIONS, Activation


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


def fuse_experts(model: nn.Module, library: Library, changes: Changes) -> None:
    """Give every module of experts a `GroupedExperts`, each compared with its own forward. Raises Unfused."""
    for module in filter(is_experts, model.modules()):
        changes.set(module, "forward", _grouped(module, library))


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the weights of all experts of a layer, in transformers' form."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(weight, torch.Tensor) and weight.dim() == 3 for weight in weights)


@torch.inference_mode()
def _grouped(module: nn.Module, library: Library) -> GroupedExperts:
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
    return forward


def activation_of(module: nn.Module) -> str:
    """Return the library's name of the activation of an MLP or of experts. Raises Unfused."""
    function = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    if not callable(function):
        raise Unfused(f"{type(module).__name__} has no act_fn")
    x = torch.linspace(-8, 8, 1001)
    for name, candidate in ACTIVATIONS.items():
        if torch.allclose(function(x), candidate(x), atol=1e-6):
            return name
    raise Unfused(f"its activation is {type(function).__name__}")
