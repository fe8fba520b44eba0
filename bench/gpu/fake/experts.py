"""Products of experts on a fake GPU: each is one kernel, as with Triton, and reads the experts that its rows use."""

from dataclasses import dataclass

import torch

from bench.gpu.fake.costs import size_of, used_share
from bench.gpu.fake.gpu import FakeGpu, MixedDevices
from fairlead_worker.model.lowbit.experts import ExpertWeights, Route, Scales
from fairlead_worker.model.lowbit.rows import Rounded


@dataclass(frozen=True)
class FakeProduct:
    """As `TritonProduct`: it checks shapes and devices, and its result has no content."""

    gpu: FakeGpu

    def multiply(self, inputs: torch.Tensor | Rounded, weights: ExpertWeights, route: Route, each: int) -> torch.Tensor:
        experts, outputs, width = *weights.values.shape[:2], weights.inputs
        values = inputs.values if isinstance(inputs, Rounded) else inputs
        parts = [values, weights.values, weights.scale, route.order, route.ends, *(inputs[1:2] if isinstance(inputs, Rounded) else ())]
        if any(part.device.type != "cuda" for part in parts):
            raise MixedDevices("triton.experts: a tensor is on the host")
        pairs = len(route.order)
        if values.shape[-1] != width or pairs > each * values.shape[0] or len(route.ends) != experts:
            raise ValueError(f"triton.experts: {pairs} pairs of {tuple(values.shape)} with weights of {tuple(weights.values.shape)}")
        if (weights.scales is Scales.ROWS) != (weights.scale.dim() == 2):
            raise ValueError(f"triton.experts: scales of {tuple(weights.scale.shape)} are no {weights.scales.value}")
        out = torch.empty(pairs, outputs, dtype=torch.bfloat16, device=values.device)
        used = used_share(experts, pairs) * (size_of(weights.values) + size_of(weights.scale))
        rest = sum(map(size_of, (values, route.order, route.ends, out)))
        dtype = str(values.dtype).removeprefix("torch.")
        self.gpu.kernel(f"triton.experts {dtype}", int(used) + rest, 2 * pairs * outputs * width, dtype)
        return out
