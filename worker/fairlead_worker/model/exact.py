"""A model's numbers in float32, whatever its dtype and the form of its weights: what `model.acceptance` compares with.

Weights are widened as they are used and forgotten: a part of a linear layer at a time, and the experts of one layer together. So an 8B
model in bfloat16 needs no second copy.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.model.lowbit.experts import LowBitExperts, find_route, multiply_exactly, sum_choices
from fairlead_worker.model.lowbit.linear import LowBitLinear
from fairlead_worker.model.lowbit.rows import ACTIVATIONS
from fairlead_worker.native.linear import NativeLinear

PART = 1 << 20
"""Weights of a linear layer that are widened at a time: 4 MiB, which the allocator keeps, while each larger block is new memory."""
PLAIN: tuple[type, ...] = (torch.Tensor, nn.Parameter)
"""Weights of any other type are a library's own numbers of few bits."""
Read = Callable[[int, int], torch.Tensor]
"""Returns the weights [end - begin, inputs] of outputs begin to end, in float32."""


@contextmanager
def widened(module: nn.Module) -> Iterator[None]:
    """Let `module` compute in float32 inside this context. Inputs other than token ids must be float32 already."""
    with ExitStack() as undo:
        for part in module.modules():
            read = reader_of(part)
            if read is not None:
                _replace_forward(part, _multiplier(part, read), undo)
            elif isinstance(part, LowBitExperts):
                _replace_forward(part, _expert_sum(part), undo)
            elif isinstance(part, nn.Embedding) and _takes_ids(part):
                _widen_rows(part, undo)
            elif _has_floats(part):
                _widen_own(part, undo)
        yield


def reader_of(layer: nn.Module) -> Read | None:
    """Return how the weights of a linear layer are read; None if it is no linear layer that is known."""
    weight: Any = getattr(layer, "weight", None)
    if isinstance(layer, NativeLinear):
        return layer.widen
    if isinstance(layer, LowBitLinear):
        return lambda begin, end: layer.part(begin, end).numbers()
    if isinstance(layer, nn.Linear) and (type(layer).forward is nn.Linear.forward or getattr(layer, "rounds", False)):  # no router
        if type(weight) in PLAIN:
            return lambda begin, end: weight[begin:end].float()
        return lambda begin, end: weight.dequantize()[begin:end].float()
    return None


def _multiplier(layer: Any, read: Read) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward of a linear layer in float32."""
    outputs: int = layer.out_features
    bias = None if layer.bias is None else layer.bias.float()
    in_parts = type(layer) is not nn.Linear or type(layer.weight) in PLAIN  # a library's numbers are widened as a whole

    def multiply(inputs: torch.Tensor) -> torch.Tensor:
        size = max(PART // inputs.shape[-1], 1) if in_parts else outputs
        parts = [functional.linear(inputs, read(begin, min(begin + size, outputs))) for begin in range(0, outputs, size)]
        answer = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return answer if bias is None else answer + bias

    return multiply


def _expert_sum(experts: LowBitExperts) -> Callable[..., torch.Tensor]:
    """Return the forward of low-bit experts in float32, expert after expert."""

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        route = find_route(top_k_index, experts.numbers)
        gate, up = multiply_exactly(hidden_states, experts.gate_up, route, top_k_index.shape[1]).chunk(2, -1)
        pairs = multiply_exactly(ACTIVATIONS[experts.activation](gate) * up, experts.down, route, 1)
        return sum_choices(pairs, top_k_weights.float())

    return forward


def _replace_forward(module: nn.Module, forward: Callable[..., torch.Tensor], undo: ExitStack) -> None:
    own = vars(module).get("forward")
    undo.callback(lambda: vars(module).pop("forward") if own is None else vars(module).update(forward=own))
    module.__dict__["forward"] = forward


def _takes_ids(embedding: nn.Embedding) -> bool:
    """Return whether the first argument of its forward is the rows to look up: OPT's positions get a mask first."""
    return list(inspect.signature(type(embedding).forward).parameters)[1] in ("input", "input_ids")


def _has_floats(module: nn.Module) -> bool:
    """Return whether the module itself has numbers besides its children's."""
    return any(value is not None and value.is_floating_point() for value in (*module._parameters.values(), *module._buffers.values()))


def _widen_own(module: nn.Module, undo: ExitStack) -> None:
    """Widen what a norm, a gate or experts have themselves, while they run."""
    own: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    parameters: dict[str, Any] = module._parameters

    def widen(*_: object) -> None:
        for values in (parameters, module._buffers):
            for name, value in values.items():
                if value is not None and value.is_floating_point() and value.dtype != torch.float32:
                    own.append((values, name, value))
                    wide = value.float()
                    values[name] = nn.Parameter(wide, requires_grad=False) if isinstance(value, nn.Parameter) else wide

    def restore(*_: object) -> None:
        while own:
            values, name, value = own.pop()
            values[name] = value

    undo.callback(restore)
    undo.callback(module.register_forward_hook(restore).remove)
    undo.callback(module.register_forward_pre_hook(widen).remove)


def _widen_rows(embedding: nn.Embedding, undo: ExitStack) -> None:
    """Widen the rows that a step looks up: a whole table may be larger than all layers."""
    table, padding = embedding.weight, embedding.padding_idx
    parameters: dict[str, Any] = embedding._parameters

    def widen(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids = inputs[0]
        embedding.padding_idx = None
        parameters["weight"] = nn.Parameter(table[ids.flatten()].float(), requires_grad=False)
        return (torch.arange(ids.numel(), device=ids.device).view(ids.shape), *inputs[1:])

    def restore(*_: object) -> None:
        parameters["weight"], embedding.padding_idx = table, padding

    undo.callback(restore)
    undo.callback(embedding.register_forward_hook(restore).remove)
    undo.callback(embedding.register_forward_pre_hook(widen).remove)
