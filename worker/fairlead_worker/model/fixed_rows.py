"""Linear layers, routers and experts that always multiply the same number of rows, so that a library always chooses the same kernel.

cuBLAS chooses tiles, and ways to split a sum, by the number of rows, so a row's last bits depend on the batch. For one size there is
one kernel, in which a row's sum does not depend on the others (Thinking Machines, "Defeating Nondeterminism in LLM Inference").
Missing rows are zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from fairlead_worker.model.fused.experts import is_experts
from fairlead_worker.model.lowbit.experts import sum_choices
from fairlead_worker.model.lowbit.linear import LowBitLinear

ROWS = {"cpu": 16}
GPU_ROWS = 256
"""Approximate number of rows from which products are no longer bound by reading the weights."""


@dataclass(frozen=True, slots=True, eq=False)
class FixedRows:
    """The forward of a linear layer."""

    plain: Callable[[torch.Tensor], torch.Tensor]
    rows: int

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply [..., in_features] -> [..., out_features]."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        missing = -len(flat) % self.rows if len(flat) else self.rows
        blocks = torch.split(functional.pad(flat, (0, 0, 0, missing)), self.rows)
        answers = [self.plain(block.contiguous()) for block in blocks]
        answer = answers[0] if len(answers) == 1 else torch.cat(answers)
        return answer[: len(flat)].view(*inputs.shape[:-1], answer.shape[-1])


@dataclass(frozen=True, slots=True, eq=False)
class FixedRouter:
    """The forward of a router: a tuple of tensors, each with a row for each token."""

    plain: Callable[..., tuple[torch.Tensor, ...]]
    rows: int

    def __call__(self, hidden_states: torch.Tensor, *further: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the router does, of states [T, width] or [1, T, width]. further: a correction of all tokens' scores."""
        tokens = hidden_states.shape[-2]
        blocks = torch.split(functional.pad(hidden_states, (0, 0, 0, -tokens % self.rows)), self.rows, -2)
        return tuple(torch.cat(parts)[:tokens] for parts in zip(*(self.plain(block, *further) for block in blocks), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class FixedExperts:
    """The forward of the experts of a layer: one expert after the other, so that the number of its rows is fixed too."""

    plain: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    rows: int

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return [T, width] for tokens [T, width], their experts [T, choices] and the weights of these."""
        chosen, choices = top_k_index.flatten(), top_k_index.shape[1]
        answers = hidden_states.new_empty(len(chosen), hidden_states.shape[1])
        for expert in sorted(set(chosen.tolist())):
            places = (chosen == expert).nonzero()[:, 0]
            answers[places] = FixedRows(partial(self._answer, expert), self.rows)(hidden_states[places // choices])
        return sum_choices(answers, top_k_weights)

    def _answer(self, expert: int, states: torch.Tensor) -> torch.Tensor:
        index = torch.full((len(states), 2), expert, device=states.device)  # LongCat's do not run with one choice
        return self.plain(states, index, states.new_tensor([[1, 0]]).expand(len(states), 2))


def fix_rows(model: PreTrainedModel) -> int:
    """Fix the rows of every torch linear layer of `model`, in place; return how many. Packed layers (`model.packed`) do not need it.

    On a CPU also of routers and experts. On a GPU the experts' own kernels decide, which `check_invariance` then judges.
    """
    rows, fixed = ROWS.get(model.device.type, GPU_ROWS), 0
    for layer in model.modules():
        named: Any = layer
        if model.device.type == "cpu" and type(layer).__name__.lower().endswith("router"):
            named.forward = FixedRouter(named.forward, rows)
        elif isinstance(layer, nn.Linear | LowBitLinear):
            named.forward, fixed = FixedRows(named.forward, rows), fixed + 1
        elif model.device.type == "cpu" and is_experts(layer):
            named.forward = FixedExperts(named.forward, rows)
    return fixed
