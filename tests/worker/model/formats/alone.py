"""One rank of a sharded model, loaded alone; and a CPU that is taken for a GPU."""

import pytest
import torch

from fairlead_worker.model import loader
from fairlead_worker.model.formats import base, compressed, experts, float8, integers
from fairlead_worker.model.lowbit.linear import Fp8BlockLinear
from fairlead_worker.model.lowbit.rows import Rounded, TorchRounder, dequantized
from fairlead_worker.sharding.group import Group


class Alone(Group):
    """One rank whose others send nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 2, torch.device("cpu"))

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.size, -1)

    def least(self, number: int) -> int:
        return number

    def objection(self, error: str, digest: str = "") -> str:
        return error


def explicit(layer: Fp8BlockLinear, rounded: Rounded) -> torch.Tensor:
    """Multiply as cuBLAS does; torch has no product of blocks on a CPU."""
    answer = dequantized(rounded) @ layer.numbers().T
    return (answer if layer.bias is None else answer + layer.bias).to(layer.dtype)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Let formats decide as for a GPU whose products are right."""
    monkeypatch.setattr(loader, "capability_of", lambda device: capability)
    for form in (base.Format, float8.Float8, integers.PackedIntegers, compressed.CompressedTensors):
        monkeypatch.setattr(form, "find_problem", lambda form, device: "")
    monkeypatch.setattr(experts, "find_problem", lambda *_: "")
    for module in (float8, compressed, experts):
        monkeypatch.setattr(module, "choose_rounder", lambda device, blocks=False: TorchRounder(blocks))
    monkeypatch.setattr(Fp8BlockLinear, "multiply", explicit)
