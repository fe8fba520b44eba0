"""RMS norms in one kernel, including the sum before a norm.

A layer's forward adds the outputs of attention and the MLP to the residual, and a norm reads the sum. If a layer matches `LAYOUTS`,
its forward becomes `Residual`: the same modules, with each sum and the following norm in one kernel. The norm after a layer's last
sum belongs to the next layer. It is computed early and returned when that norm is called with the same sum.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.model.acceptance import find_refusal
from fairlead_worker.model.exact import widened
from fairlead_worker.model.fuse import sample_input
from fairlead_worker.model.fused.library import DTYPES, Library
from fairlead_worker.model.fused.patch import Patch, Unfused
from fairlead_worker.model.lowbit.linear import Fp8Linear
from fairlead_worker.model.lowbit.rows import Rounder, attach
from fairlead_worker.model.norm import read_norm
from fairlead_worker.model.structure import LAYOUTS


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """The forward of a norm."""

    library: Library
    weight: torch.Tensor
    """[width]"""
    eps: float
    plus_one: bool
    """Gemma's norm: the factor is weight + 1."""
    rounder: Rounder | None = None
    """Also rounds the norm of a sum to float8, for layers that multiply float8."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise [..., width]. [1, T, heads, width] and its transpose, as for norms of queries and keys, are read in place."""
        shape = hidden_states.shape
        if self.plus_one:
            return self.library.gemma_rmsnorm(hidden_states.reshape(-1, shape[-1]), self.weight, self.eps).view(shape)
        if len(shape) != 4 or shape[0] != 1:
            return self.library.rmsnorm(hidden_states.reshape(-1, shape[-1]), self.weight, self.eps).view(shape)
        heads = hidden_states[0]
        turned = heads.stride(0) < heads.stride(1)
        answer = self.library.rmsnorm(heads.transpose(0, 1) if turned else heads, self.weight, self.eps)
        return (answer.transpose(0, 1) if turned else answer)[None]

    def add(self, update: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the norm of residual + update, both [..., width]. `residual` becomes the sum, and `update` is overwritten."""
        width = update.shape[-1]
        if self.rounder is not None:
            rows = update.view(-1, width), residual.view(-1, width)
            rounded = self.rounder.add_norm(*rows, self.weight, self.eps, self.plus_one)
            return attach(update, rounded._replace(shape=tuple(update.shape)))
        add = self.library.gemma_fused_add_rmsnorm if self.plus_one else self.library.fused_add_rmsnorm
        add(update.view(-1, width), residual.view(-1, width), self.weight, self.eps)
        return update


class PrecomputedNorm:
    """The forward of a norm whose result may be computed already. The result is returned once, for the tensor that it was computed from."""

    def __init__(self, norm: RmsNorm) -> None:
        self.norm = norm
        self._sum: torch.Tensor | None = None
        self._answer: torch.Tensor | None = None

    def add(self, update: torch.Tensor, residual: torch.Tensor) -> None:
        self.keep(self.norm.add(update, residual), residual)

    def keep(self, answer: torch.Tensor, residual: torch.Tensor) -> None:
        """Keep the norm of `residual`."""
        self._answer, self._sum = answer, residual

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        answer, known = self._answer, hidden_states is self._sum
        self._answer = self._sum = None
        return answer if known and answer is not None else self.norm(hidden_states)


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """The forward of a decoder layer. Its input tensor becomes the sum that it returns."""

    attention: nn.Module
    mlp: nn.Module
    before_attention: nn.Module
    after_attention: nn.Module | None
    before_mlp: Any
    """RmsNorm, or `sums.SummedNorm`."""
    after_mlp: nn.Module | None
    following: Any
    """PrecomputedNorm, or `sums.SummedAhead`."""

    def __call__(self, hidden_states: torch.Tensor, *unnamed: Any, **named: Any) -> torch.Tensor:
        update = self.attention(self.before_attention(hidden_states), *unnamed, **named)[0]
        if self.after_attention is not None:
            update = self.after_attention(update)
        update = self.mlp(self.before_mlp.add(update, hidden_states))
        if self.after_mlp is not None:
            update = self.after_mlp(update)
        self.following.add(update, hidden_states)
        return hidden_states


def norm_patches(model: PreTrainedModel, library: Library) -> list[Patch]:
    """Return patches of every RMS norm of `model`, each compared with its own forward. Raises Unfused if there is none."""
    found = [(module, rms_norm(module, library)) for module in model.modules() if _maybe(module)]
    patches = [Patch(module, norm) for module, norm in found if norm is not None]
    if not patches:
        raise Unfused("it has no RMS norm in 16 bits")
    return patches


def _maybe(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() == 1 and weight.dtype in DTYPES


@torch.inference_mode()
def rms_norm(module: nn.Module, library: Library) -> RmsNorm | None:
    """Return the RMS norm that `module` computes; None if it is not one, or the kernel is farther from float32 than the module."""
    form = read_norm(module)
    if form is None:
        return None
    weight = module.get_parameter("weight").detach()
    norm, inputs = RmsNorm(library, weight, form.eps, form.plus_one), sample_input(len(weight), weight) * 3
    with widened(module):
        exact = module(inputs.float())
    return None if find_refusal(norm(inputs), module(inputs), exact) else norm


def residual_patches(model: PreTrainedModel) -> list[Patch]:
    """Return patches of all layers and the norms that begin them, and of the final norm. The norms must be `RmsNorm` already. Raises
    Unfused.
    """
    layers, final = getattr(model.base_model, "layers", None), getattr(model.base_model, "norm", None)
    if not isinstance(layers, nn.ModuleList) or final is None:
        raise Unfused("it is not a list of layers followed by a norm")
    parts = [_parts(layer) for layer in layers]
    ahead = [
        PrecomputedNorm(_fused_norm(norms["before_attention"], layer.get_submodule("self_attn")))
        for layer, norms in zip(layers, parts, strict=True)
    ]
    ahead.append(PrecomputedNorm(_fused_norm(final)))
    patches = []
    for number, (layer, norms) in enumerate(zip(layers, parts, strict=True)):
        patches.append(Patch(norms["before_attention"], ahead[number]))
        forward = Residual(
            layer.get_submodule("self_attn"),
            layer.get_submodule("mlp"),
            norms["before_attention"],
            norms.get("after_attention"),
            _fused_norm(norms["before_mlp"], layer.get_submodule("mlp")),
            norms.get("after_mlp"),
            ahead[number + 1],
        )
        patches.append(Patch(layer, forward))
    return [*patches, Patch(final, ahead[-1])]


def _parts(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the norms by their place in `LAYOUTS`. Raises Unfused."""
    names = frozenset(name for name, _ in layer.named_children()) - {"self_attn", "mlp"}
    if names not in LAYOUTS or not all(hasattr(layer, name) for name in ("self_attn", "mlp")):
        raise Unfused(f"{type(layer).__name__} has {', '.join(sorted(names))}")
    return {place: layer.get_submodule(name) for place, name in LAYOUTS[names].items()}


def _fused_norm(module: nn.Module, reader: nn.Module | None = None) -> RmsNorm:
    """Return the fused norm of `module`, which also rounds if `reader`, the module that reads it, multiplies float8."""
    forward = vars(module).get("forward")
    if not isinstance(forward, RmsNorm):
        raise Unfused(f"its {type(module).__name__} is not fused")
    layers = [] if reader is None else [layer for layer in reader.modules() if isinstance(layer, Fp8Linear)]
    return replace(forward, rounder=layers[0].rounder) if layers and layers[0].rounder.fuses else forward
