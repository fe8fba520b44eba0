"""A matrix for each attention head."""

import torch
from torch import nn

from fairlead_worker.native.library import native
from fairlead_worker.native.linear import KINDS, NativeLinears


class HeadLinear(nn.Module):
    """y[t, h] = W[h] x[t, h], without bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [heads, outputs, inputs]."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.packed: NativeLinears | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [T, heads, outputs] of rows [T, heads, inputs]."""
        if self.packed is None:
            return torch.bmm(rows.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)
        if rows.dtype != self.packed.dtype:  # `model.exact` lets each layer compute in float32
            return torch.stack([layer(rows[:, head]) for head, layer in enumerate(self.packed)], 1)
        out: torch.Tensor = self.packed(rows)
        return out

    def pack(self) -> None:
        """Lay out the weight for the native library, on a CPU that has it: a row's bits then do not depend on the number of rows."""
        if self.packed is None and native() is not None and self.weight.dtype in KINDS and self.weight.device.type == "cpu":
            self.packed = NativeLinears(self.weight)
            del self.weight
