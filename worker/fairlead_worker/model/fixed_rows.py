"""Linear layers that always multiply the same number of rows, so that a library always chooses the same kernel.

cuBLAS chooses tiles, and ways to split a sum, by the number of rows, so a row's last bits depend on the batch. For one size there is
one kernel, in which a row's sum does not depend on the others (Thinking Machines, "Defeating Nondeterminism in LLM Inference").
Missing rows are zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

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


def fix_rows(model: PreTrainedModel) -> int:
    """Fix the rows of every torch linear layer of `model`, in place; return how many. Packed layers (`model.packed`) do not need it."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | Conv1D | LowBitLinear)]
    for layer in layers:
        layer.forward = FixedRows(layer.forward, ROWS.get(model.device.type, GPU_ROWS))  # type: ignore[method-assign]  # this object's
    return len(layers)
