"""Rounding on a fake GPU: each call is one kernel, as with Triton."""

from dataclasses import dataclass

import torch

from bench.gpu.fake.costs import size_of
from bench.gpu.fake.gpu import FakeGpu, MixedDevices
from fairlead_worker.model.lowbit.rows import FLOAT8, GROUP, ROWS, Rounded


@dataclass(frozen=True)
class FakeRounder:
    """As `TritonRounder`: it checks shapes and devices, and its results have no content."""

    gpu: FakeGpu
    blocks: bool = False
    fuses: bool = True

    def round(self, inputs: torch.Tensor) -> Rounded:
        return self._made("round", (inputs,), inputs.shape, size_of(inputs))

    def add_norm(self, update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> Rounded:
        if update.dim() != 2 or update.shape != residual.shape or weight.shape != update.shape[-1:]:
            raise ValueError(f"add_norm: {tuple(update.shape)} and {tuple(residual.shape)} with {tuple(weight.shape)}")
        return self._made("add_norm", (update, residual, weight), update.shape, 4 * size_of(update) + size_of(weight))

    def gated(self, both: torch.Tensor, activation: str) -> Rounded:
        return self._made(activation, (both,), (*both.shape[:-1], both.shape[-1] // 2), size_of(both))

    def _made(self, name: str, inputs: tuple[torch.Tensor, ...], shape: tuple[int, ...], moved: int) -> Rounded:
        if any(part.device.type != "cuda" for part in inputs):
            raise MixedDevices(f"triton.{name}: a tensor is on the host")
        count, width = torch.Size(shape[:-1]).numel(), shape[-1]
        padded = count + -count % ROWS if self.blocks else count
        values = torch.empty(padded, width, dtype=FLOAT8, device=inputs[0].device)
        scale = torch.empty(width // GROUP if self.blocks else 1, padded, device=inputs[0].device).t()
        if count:
            self.gpu.kernel(f"triton.{name}", moved + size_of(values) + size_of(scale))
        return Rounded(values, scale, tuple(shape))
