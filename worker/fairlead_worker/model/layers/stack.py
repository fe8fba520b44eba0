"""Projections of one input: separate as checkpoints have them, or stacked into one matrix after the load (q, k and v; gate and up).

Adapters hook a projection by its name. In a stack, a `Slice` has that name: its hooks see the input and this projection's part of the
stack's output, which they change in place.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fairlead_worker.model.lowbit.linear import LowBitLinear, is_plain
from fairlead_worker.sharding.shards import AnyCut, Cut, cut_spans

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Stack(nn.Module):
    """One linear layer in place of several."""

    def __init__(self, parts: Sequence[Any]) -> None:
        """parts: torch's linear layers, or others that have `stacked`, as `LowBitLinear`."""
        super().__init__()
        first = parts[0]
        self.linear: nn.Module = _stacked(parts) if isinstance(first, nn.Linear) else first.stacked(parts[1:])
        self.sizes: list[int] = [part.out_features for part in parts]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all parts, [T, sum of sizes]."""
        outputs: torch.Tensor = self.linear(inputs)
        return outputs


class Slice(nn.Module):
    """A projection that is part of a stack."""

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features

    def forward(self, inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Return `outputs`, this projection's of the stack. Only its hooks do something."""
        return outputs


class Projections(nn.Module):
    """A module with several projections of its input."""

    STACK: str
    """Name of the stack, or of the one layer that a checkpoint has instead of the parts."""
    PARTS: tuple[str, ...]
    sizes: list[int]
    """Outputs of each part; of a sharded model, this rank's."""

    def add_projections(self, width: int, sizes: list[int], bias: bool, stacked: bool) -> None:
        """stacked: whether the checkpoint has one matrix for all parts, as Phi-3's."""
        self.sizes = sizes
        if stacked:
            self.add_module(self.STACK, nn.Linear(width, sum(sizes), bias))
            return
        for name, size in zip(self.PARTS, sizes, strict=True):
            self.add_module(name, nn.Linear(width, size, bias))

    def stack(self) -> bool:
        """Stack the parts, in place; return whether this could be done now: they are alike, and have no hooks."""
        parts = [getattr(self, name, None) for name in self.PARTS]
        if not _stackable(parts):
            return False
        self.add_module(self.STACK, Stack(parts))
        for name, part in zip(self.PARTS, parts, strict=True):
            setattr(self, name, Slice(part))
        return True

    @property
    def whole(self) -> Any:
        """Return the layer of all parts; None if they are separate."""
        return self._modules.get(self.STACK)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all parts side by side, [T, their sum], of states [T, width]. There must be a `whole`."""
        whole = self.whole
        outputs: torch.Tensor = whole(states)
        if isinstance(whole, Stack):
            for name, part in zip(self.PARTS, torch.split(outputs, whole.sizes, -1), strict=True):
                piece: nn.Module = getattr(self, name)
                if piece._forward_hooks:
                    piece(states, part)
        return outputs

    def project(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the outputs of each part, [T, its size]."""
        whole = self.whole
        if whole is None:
            return [getattr(self, name)(states) for name in self.PARTS]
        outputs = self.multiply(states)
        return torch.split(outputs, whole.sizes if isinstance(whole, Stack) else self.sizes, -1)

    def divide_projections(self, spans: Sequence[tuple[int, int]]) -> dict[str, AnyCut]:
        """Keep of each part's outputs a span (begin, end); return the parts of their tensors, by name."""
        sizes, self.sizes = self.sizes, [end - begin for begin, end in spans]
        if self.whole is not None:
            return {self.STACK: cut_spans(sizes, spans)}
        return {name: Cut(0, *span, size) for name, span, size in zip(self.PARTS, spans, sizes, strict=True)}


def _stacked(parts: Sequence[Any]) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), bias=False)
    linear.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    if parts[0].bias is not None:
        linear.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return linear


def _stackable(parts: Sequence[Any]) -> bool:
    if not all(isinstance(part, nn.Module) and not part._forward_hooks and not part._forward_pre_hooks for part in parts):
        return False
    if isinstance(first := parts[0], LowBitLinear):
        return all(first.matches(part) for part in parts)
    if not all(type(part) is nn.Linear and is_plain(part) for part in parts):
        return False
    return len({(p.in_features, p.weight.dtype, p.weight.device, p.bias is None) for p in parts}) == 1 and first.weight.dtype in DTYPES
