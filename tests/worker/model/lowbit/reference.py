"""Rounding in plain torch, with the norm and the activation before it: what the kernels have to compute."""

import torch
from bench.gpu import interpreter

from fairlead_worker.model.lowbit.rows import Rounded, TorchRounder


class ReferenceRounder(TorchRounder):
    """Counts its calls by name."""

    fuses = True

    def __init__(self, blocks: bool = False) -> None:
        super().__init__(blocks)
        self.calls: dict[str, int] = {}

    def round(self, inputs: torch.Tensor) -> Rounded:
        return self._count("round", super().round(inputs))

    def add_norm(self, update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> Rounded:
        add = interpreter.gemma_fused_add_rmsnorm if plus_one else interpreter.fused_add_rmsnorm
        add(update, residual, weight, eps)
        return self._count("add_norm", super().round(update))

    def gated(self, both: torch.Tensor, activation: str) -> Rounded:
        return self._count(activation, super().round(getattr(interpreter, activation)(both)))

    def _count(self, name: str, rounded: Rounded) -> Rounded:
        self.calls[name] = self.calls.get(name, 0) + 1
        return rounded
