"""Fusion: projections of one input stacked into one matrix (q, k and v; gate and up), and activations in one operator.

No forward is parsed or replaced. Each projection becomes a shim of the same name: the first one called runs the stacked matrix, the
others take their slices of its output. So neither the order of a family's calls nor an unused projection matters.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import FastGELUActivation, NewGELUActivation

from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.model.acceptance import find_refusal
from fairlead_worker.model.lowbit.experts import LowBitExperts
from fairlead_worker.model.lowbit.linear import LowBitLinear
from fairlead_worker.model.quantized import is_plain
from fairlead_worker.model.trial_text import ENDS, Reference, run_whole

logger = logging.getLogger(__name__)

GROUPS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Name of the stack in its parent -> the children that it replaces, by the names that nearly all families use."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Stack(nn.Module):
    """One linear layer in place of several. It keeps its last output until each of them has taken its slice."""

    def __init__(self, parts: list[nn.Linear] | list[LowBitLinear]) -> None:
        super().__init__()
        first = parts[0]
        self.linear: nn.Module = _stacked(parts) if isinstance(first, nn.Linear) else first.stacked(parts[1:])
        self.sizes = [p.out_features for p in parts]
        self._input: torch.Tensor | None = None
        self._answers: list[torch.Tensor | None] = []

    def take(self, part: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return slice `part` of the stack's output for `inputs`. The output is kept for this very tensor only, and each slice is
        returned once.
        """
        answer = self._answers[part] if inputs is self._input else None
        if answer is None:
            self._input, self._answers = inputs, list(self.linear(inputs).split(self.sizes, -1))
            answer = self._answers[part]
            assert answer is not None
        self._answers[part] = None
        if not any(a is not None for a in self._answers):
            self._input = None
        return answer


class Slice(nn.Module):
    """Shim in place of a projection."""

    def __init__(self, stack: Stack, part: int, replaced: nn.Linear | LowBitLinear) -> None:
        super().__init__()
        self._stack = (stack,)  # a tuple hides the stack from torch: it must be a child of its parent only, not of each slice
        self.part = part
        self.in_features, self.out_features = replaced.in_features, replaced.out_features

    @property
    def stack(self) -> Stack:
        return self._stack[0]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.stack.take(self.part, inputs)


def _stacked(parts: Sequence[Any]) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), bias=False)
    linear.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    if parts[0].bias is not None:
        linear.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return linear


@torch.inference_mode()
def fuse_projections(model: PreTrainedModel, layers: tuple[LayerSpec, ...], reference: Reference) -> int:
    """Stack projections of `model` in place; return the number of stacks.

    The first stack of each group is tried in a forward pass of the whole model (`model.acceptance`). The others hold the same weights in
    the same way. All groups are tried together, and one by one if that fails.
    """
    sites = _stack_sites(model)
    names = [name for name, parents in sites.items() if parents]
    if not names:
        return 0

    ends = ENDS.to(model.device)

    def run() -> torch.Tensor:
        return reference.take(run_whole(model, layers, reference.text, model.dtype, ends), ends)

    def find_problem(names: Sequence[str]) -> str:
        replaced = [(sites[name][0], name, _stack(sites[name][0], name)) for name in names]
        try:
            return find_refusal(run(), before, reference.logprobs[ends])
        except Exception as error:  # whatever a family's own code raises for a shim
            return f"the model does not run: {error}"
        finally:
            for parent, name, parts in replaced:
                delattr(parent, name)
                for child, part in parts.items():
                    setattr(parent, child, part)

    before = run()
    problems = dict.fromkeys(names, "") if not find_problem(names) else {name: find_problem([name]) for name in names}
    for name, problem in problems.items():
        if problem:
            logger.warning("%s: %s stays unfused: %s", type(model).__name__, "/".join(GROUPS[name]), problem)
    taken = [(parent, name) for name, problem in problems.items() if not problem for parent in sites[name]]
    for parent, name in taken:
        _stack(parent, name)
    return len(taken)


def stack_projections(model: nn.Module) -> None:
    """Stack all projections of `model` in place without a trial, as of a model without weights."""
    for name, parents in _stack_sites(model).items():
        for parent in parents:
            _stack(parent, name)


def _stack_sites(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the modules whose projections can be stacked, by the name of the stack."""
    return {name: [parent for parent in model.modules() if _stackable(parent, name, children)] for name, children in GROUPS.items()}


@torch.inference_mode()
def fuse_activations(model: PreTrainedModel) -> int:
    """Replace GELU's tanh formula, spelt out in eight operators (GPT-2, Phi), by torch's own, in place; return how many.

    A prefill of 128 tokens by GPT-2's 124M shape took 77 ms on two cores, 9 of them for this. Each is compared with what it replaces.
    """
    sites = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in (NewGELUActivation, FastGELUActivation) and not _has_hooks(child)
    ]
    if not sites:
        return 0
    fused, values = nn.GELU(approximate="tanh"), 4 * sample_input(1024, model.get_input_embeddings().weight)
    exact = fused(values.float())
    sites = [(parent, name) for parent, name in sites if not find_refusal(fused(values), getattr(parent, name)(values), exact)]
    for parent, name in sites:
        setattr(parent, name, nn.GELU(approximate="tanh"))
    return len(sites)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether two tensors are equal but for the order of a sum and a rounding to their dtype, in units of the largest number."""
    tolerance = max(2 * torch.finfo(want.dtype).eps, 1e-5)
    scale = want.abs().max().float().item() or 1.0
    return bool((got.float() - want.float()).abs().max().item() <= scale * tolerance)


def _stackable(parent: nn.Module, name: str, children: tuple[str, ...]) -> bool:
    parts = [getattr(parent, child, None) for child in children]
    if hasattr(parent, name) or not all(isinstance(part, nn.Module) and not _has_hooks(part) for part in parts):
        return False
    if isinstance(first := parts[0], LowBitLinear):
        return all(part is not None and first.matches(part) for part in parts)
    if not all(type(part) is nn.Linear and is_plain(part) for part in parts):
        return False
    linears = [part for part in parts if isinstance(part, nn.Linear)]
    return (
        len({(p.in_features, p.weight.dtype, p.weight.device, p.bias is None) for p in linears}) == 1 and linears[0].weight.dtype in DTYPES
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _stack(parent: nn.Module, name: str) -> dict[str, Any]:
    """Replace the projections of a group by their stack; return them by name."""
    parts = {child: getattr(parent, child) for child in GROUPS[name]}
    stack = Stack(list(parts.values()))
    for index, (child, part) in enumerate(parts.items()):
        setattr(parent, child, Slice(stack, index, part))
    setattr(parent, name, stack)
    return parts


def sample_input(width: int, like: torch.Tensor, count: int = 5) -> torch.Tensor:
    """Return [1, count, width] of fixed random numbers, on the device and in the dtype of `like`."""
    generator = torch.Generator().manual_seed(width)
    return torch.randn(1, count, width, generator=generator).to(like)


def sample_for(linear: nn.Module, count: int = 5) -> torch.Tensor:
    """Return `sample_input` for a linear layer."""
    weight: Any = linear.weight
    if isinstance(linear, LowBitLinear):
        return sample_input(linear.in_features, torch.empty(0, dtype=linear.dtype, device=linear.device), count)
    return sample_input(weight.shape[1], weight, count)


def rounds_inputs(module: nn.Module) -> bool:
    """Return whether some layer of `module` rounds its inputs to 8 bits."""
    return any((isinstance(part, LowBitLinear) and part.rounds) or isinstance(part, LowBitExperts) for part in module.modules())
