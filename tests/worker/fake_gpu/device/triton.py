"""The worker's Triton kernels on the fake GPU: each call is one kernel, and its result has no content."""

from dataclasses import dataclass

import torch
from tests.worker.fake_gpu.device.costs import size_of, used_share
from tests.worker.fake_gpu.device.gpu import FakeGpu, MixedDevices

from fairlead_worker.model.lowbit import int4
from fairlead_worker.model.lowbit.experts import ExpertWeights, Route
from fairlead_worker.model.lowbit.rows import FLOAT8, GROUP, ROWS, Rounded


def _on_device(name: str, *parts: torch.Tensor) -> None:
    if any(part.device.type != "cuda" for part in parts):
        raise MixedDevices(f"triton.{name}: a tensor is on the host")


@dataclass(frozen=True)
class FakeProduct:
    """As `TritonProduct`: it reads the experts that its rows use."""

    gpu: FakeGpu

    def multiply(self, inputs: torch.Tensor | Rounded, weights: ExpertWeights, route: Route, each: int) -> torch.Tensor:
        experts, outputs = weights.values.shape[:2]
        values = inputs.values if isinstance(inputs, Rounded) else inputs
        parts = [values, weights.values, weights.scale, route.order, route.ends, *(inputs[1:2] if isinstance(inputs, Rounded) else ())]
        _on_device("experts", *parts)
        pairs = len(route.order)
        if values.shape[-1] != weights.inputs or pairs > each * values.shape[0] or len(route.ends) != experts:
            raise ValueError(f"triton.experts: {pairs} pairs of {tuple(values.shape)} with weights of {tuple(weights.values.shape)}")
        out = torch.empty(pairs, outputs, dtype=torch.bfloat16, device=values.device)
        used = used_share(experts, pairs) * (size_of(weights.values) + size_of(weights.scale))
        rest = sum(map(size_of, (values, route.order, route.ends, out)))
        dtype = str(values.dtype).removeprefix("torch.")
        self.gpu.kernel(f"triton.experts {dtype}", int(used) + rest, 2 * pairs * outputs * weights.inputs, dtype)
        return out


@dataclass(frozen=True)
class FakeRounder:
    """As `TritonRounder`."""

    gpu: FakeGpu
    blocks: bool = False
    fuses: bool = True

    def round(self, inputs: torch.Tensor) -> Rounded:
        return self._made("round", (inputs,), inputs.shape, size_of(inputs))

    def add_norm(self, update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> Rounded:
        return self._made("add_norm", (update, residual, weight), update.shape, 4 * size_of(update) + size_of(weight))

    def gated(self, both: torch.Tensor, activation: str) -> Rounded:
        return self._made(activation, (both,), (*both.shape[:-1], both.shape[-1] // 2), size_of(both))

    def _made(self, name: str, inputs: tuple[torch.Tensor, ...], shape: tuple[int, ...], moved: int) -> Rounded:
        _on_device(name, *inputs)
        count, width = torch.Size(shape[:-1]).numel(), shape[-1]
        padded = count + -count % ROWS if self.blocks else count
        values = torch.empty(padded, width, dtype=FLOAT8, device=inputs[0].device)
        scale = torch.empty(width // GROUP if self.blocks else 1, padded, device=inputs[0].device).t()
        if count:
            self.gpu.kernel(f"triton.{name}", moved + size_of(values) + size_of(scale))
        return Rounded(values, scale, tuple(shape))


def widen(gpu: FakeGpu, weight: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Read 4 bits and write 16."""
    _on_device("widen", weight, pairs)
    made = torch.empty(int4.shape_of(weight), dtype=torch.bfloat16, device=weight.device)
    gpu.kernel("triton.widen", size_of(weight) + size_of(pairs) + size_of(made))
    return made


def multiply(gpu: FakeGpu, values: torch.Tensor, weight: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Multiply by weights in 4 bits."""
    outputs, inputs = int4.shape_of(weight)
    _on_device("multiply", values, weight, pairs)
    if values.shape[1] != inputs or weight.shape[3] != 4:
        raise ValueError(f"triton.multiply: {tuple(values.shape)} by {tuple(weight.shape)}")
    made = values.new_empty(len(values), outputs)
    gpu.kernel("triton.multiply int4", sum(map(size_of, (values, weight, pairs, made))), 2 * values.numel() * outputs, "bfloat16")
    return made


def choose_tokens(
    gpu: FakeGpu, logits: torch.Tensor, parameters: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor, words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sampling.kernel.launch`, for rows without a filter: it reads the logits once."""
    _on_device("choose_tokens", logits, parameters, ids, numbers, words)
    tokens, dead = parameters.new_empty(len(logits), dtype=torch.int64), words.new_empty(len(words), dtype=torch.bool)
    gpu.kernel("triton.choose_tokens", sum(map(size_of, (logits, parameters, ids, numbers, words, tokens, dead))))
    return tokens, dead
