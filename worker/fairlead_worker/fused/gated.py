"""The activation of a gated MLP and the product behind it in one kernel, on the stacked projections' answer as it is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from fairlead_worker.fused.library import Library
from fairlead_worker.fused.patch import Patch, Unfused
from fairlead_worker.model.fuse import Slice, Stack, close, sample_input

Activation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu_and_mul": functional.silu,
    "gelu_tanh_and_mul": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_and_mul": functional.gelu,
}
"""The library's functions, and what each does to the gate."""


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """The forward of an MLP."""

    plain: Callable[[torch.Tensor], torch.Tensor]
    """As the family wrote it: for steps in which somebody listens to the projections, as LoRA adapters do."""
    projections: tuple[nn.Module, ...]
    gate_up: nn.Module
    activate: Activation
    """[..., 2 * inner] -> [..., inner]"""
    down: nn.Module

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if any(part._forward_hooks or part._forward_pre_hooks for part in self.projections):
            return self.plain(hidden_states)
        answer: torch.Tensor = self.down(self.activate(self.gate_up(hidden_states)))
        return answer


def gated_patches(model: PreTrainedModel, library: Library) -> list[Patch]:
    """Every MLP of one stack of gate and up, and down, compared with its own forward. Raises Unfused where there is none."""
    patches = [_patch(module, library) for module in model.modules() if hasattr(module, "down_proj") and hasattr(module, "gate_up_proj")]
    if not patches:
        raise Unfused("it has no MLP whose gate and up are one matrix")
    return patches


@torch.inference_mode()
def _patch(mlp: nn.Module, library: Library) -> Patch:
    stack, down = mlp.get_submodule("gate_up_proj"), mlp.get_submodule("down_proj")
    if isinstance(stack, Stack):
        projections, linear = tuple(child for child in mlp.children() if isinstance(child, Slice)), stack.linear
        if len(set(stack.sizes)) != 1 or len(stack.sizes) != 2:
            raise Unfused(f"{type(mlp).__name__} has projections of {stack.sizes}")
    elif isinstance(stack, nn.Linear):
        projections, linear = (), stack
    else:
        raise Unfused(f"{type(mlp).__name__} has gate_up_proj as {type(stack).__name__}")
    activate: Activation = getattr(library, _activation(mlp))
    forward = Gated(mlp.forward, projections, linear, activate, down)
    weight = linear.weight
    assert isinstance(weight, torch.Tensor)
    inputs = sample_input(weight.shape[1], weight)
    if not close(forward(inputs), mlp(inputs)):
        raise Unfused(f"{type(mlp).__name__} gives other numbers")
    return Patch(mlp, forward)


def _activation(mlp: nn.Module) -> str:
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if not callable(function):
        raise Unfused(f"{type(mlp).__name__} has no act_fn")
    x = torch.linspace(-8, 8, 1001)
    for name, candidate in ACTIVATIONS.items():
        if torch.allclose(function(x), candidate(x), atol=1e-6):
            return name
    raise Unfused(f"its activation is {type(function).__name__}")
