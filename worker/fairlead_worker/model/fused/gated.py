"""Gated MLP: the activation and the following product in one kernel, directly on the output of the stacked projections."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.model.acceptance import find_refusal
from fairlead_worker.model.exact import widened
from fairlead_worker.model.fuse import Slice, Stack, sample_for
from fairlead_worker.model.fused.library import Library
from fairlead_worker.model.fused.patch import Patch, Unfused
from fairlead_worker.model.lowbit.linear import Fp8Linear, LowBitLinear
from fairlead_worker.model.lowbit.rows import ACTIVATIONS, Activation, Rounded
from fairlead_worker.sharding.group import Summed


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """The forward of an MLP."""

    projections: tuple[nn.Module, ...]
    """Gate and up as separate modules, for steps in which a hook such as a LoRA adapter reads their outputs. Empty if they are one
    module."""
    gate_up: nn.Module
    activate: Activation
    """[..., 2 * inner] -> [..., inner]"""
    down: nn.Module
    rounded: Callable[[torch.Tensor], Rounded] | None = None
    """The same as `activate`, rounded to float8 in the same kernel: what a `down` in float8 multiplies."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if any(_has_active_hook(part) for part in self.projections):
            both = torch.cat([part(hidden_states) for part in self.projections], -1)
        else:
            both = self.gate_up(hidden_states)
        rounds = self.rounded is not None and _takes_rounded(self.down)
        answer: torch.Tensor = self.down(self.rounded(both) if rounds and self.rounded is not None else self.activate(both))
        return answer


def _has_active_hook(projection: nn.Module) -> bool:
    """Return whether a hook reads the projection in this step. A hook can have `is_active` to say that it does not."""
    return bool(projection._forward_pre_hooks) or any(getattr(hook, "is_active", True) for hook in projection._forward_hooks.values())


def _linear(layer: nn.Module) -> nn.Module:
    """Return the layer that multiplies, without the sum over ranks."""
    return layer.layer if isinstance(layer, Summed) else layer


def _takes_rounded(down: nn.Module) -> bool:
    """Return whether no hook, and no other forward (`fixed_rows`), reads the inputs of `down` in this step."""
    return not any(_has_active_hook(part) or "forward" in vars(part) for part in {down, _linear(down)})


def gated_patches(model: PreTrainedModel, library: Library) -> list[Patch]:
    """Return patches of every MLP with one stack of gate and up, and down, each compared with its own forward.

    Experts with all their weights in one parameter keep their family's code. Raises Unfused if there is no MLP.
    """
    names = {"gate_up_proj", "down_proj"}
    patches = [_patch(module, library) for module in model.modules() if names <= dict(module.named_children()).keys()]
    if not patches:
        raise Unfused("it has no MLP whose gate and up are one matrix")
    return patches


@torch.inference_mode()
def _patch(mlp: nn.Module, library: Library) -> Patch:
    stack, down = mlp.get_submodule("gate_up_proj"), mlp.get_submodule("down_proj")
    if isinstance(stack, Stack):
        projections, linear = tuple(sorted(_slices(mlp), key=lambda child: child.part)), stack.linear
        if len(set(stack.sizes)) != 1 or len(stack.sizes) != 2:
            raise Unfused(f"{type(mlp).__name__} has projections of {stack.sizes}")
    elif isinstance(stack, nn.Linear | LowBitLinear):
        projections, linear = (), stack
    else:
        raise Unfused(f"{type(mlp).__name__} has gate_up_proj as {type(stack).__name__}")
    name = activation_of(mlp)
    activate: Activation = getattr(library, name)
    last = _linear(down)
    rounded = partial(last.rounder.gated, activation=name) if isinstance(last, Fp8Linear) and last.rounder.fuses else None
    forward = Gated(projections, linear, activate, down, rounded)
    inputs = sample_for(linear)
    with widened(mlp):
        exact = mlp(inputs.float())
    if refusal := find_refusal(forward(inputs), mlp(inputs), exact):
        raise Unfused(f"{type(mlp).__name__}: {refusal}")
    return Patch(mlp, forward)


def _slices(mlp: nn.Module) -> list[Slice]:
    return [child for child in mlp.children() if isinstance(child, Slice)]


def activation_of(mlp: nn.Module) -> str:
    """Return the library's name of the activation of an MLP or of experts. Raises Unfused."""
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if not callable(function):
        raise Unfused(f"{type(mlp).__name__} has no act_fn")
    x = torch.linspace(-8, 8, 1001)
    for name, candidate in ACTIVATIONS.items():
        if torch.allclose(function(x), candidate(x), atol=1e-6):
            return name
    raise Unfused(f"its activation is {type(function).__name__}")
