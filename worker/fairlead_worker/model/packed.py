"""Linear layers whose weights are packed once, at load: for the native library, else for oneDNN as torch.compile's freezing does it.

A row's bits do not depend on the number of rows, unlike with `F.linear`.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from fairlead_worker.model.acceptance import find_refusal, sample_input
from fairlead_worker.model.layers.heads import HeadLinear
from fairlead_worker.model.lowbit.linear import is_plain
from fairlead_worker.native.library import native
from fairlead_worker.native.linear import NativeLinear, packed_bytes
from fairlead_worker.native.memory import Arena, room
from fairlead_worker.platform.isa import cpu_level

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
GROUP = 32
"""Inputs of an output that share a scale in int4."""
ROWS = 16
"""oneDNN picks a layout for a number of rows. The layout for 8 to 64 rows is as good as any for 1 to 264 rows; the one for 1 row is not."""
ENDS = 64
"""First and last outputs of a packed layer that are compared with float32: whole panels and a part of one."""
HEAD_BITS = {"int4": "int8"}
"""Quantization of the output head where it differs from the other layers': in 4 bits it alone costs SmolLM2-135M 0.07 of 0.08 nats."""
CHECKED = 64
"""Outputs whose rounded weights are compared with the exact ones. Every output is checked for NaN and infinity."""


class Make(Protocol):
    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None, quantization: str = "none") -> nn.Module: ...


class PackedLinear(nn.Module):
    """`nn.Linear` with a weight that only oneDNN can read; the plain weight is released."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out_features, in_features], bias [out_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Not a parameter: opaque tensors cannot be moved, saved or viewed like others.
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shape = inputs.shape[:-1]
        if not inputs.numel():  # the head has no rows in a step without sampling rows
            return inputs.new_empty(*shape, self.out_features)
        single = inputs.numel() == self.in_features
        if single:  # oneDNN sums a single row in another order, with other bits than in a batch (observed with 2,304 features)
            inputs = inputs.reshape(1, -1).expand(2, -1)
        answer: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")
        return answer[:1].view(*shape, self.out_features) if single else answer


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of `dtype` here: torch has it and its two (private) operators, and the CPU has the
    instructions.
    """
    if not torch._C._has_mkldnn or not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module, quantization: str = "none") -> int:
    """Replace the linear layers of `model` (on a CPU) in place; return how many. Each is compared with the layer that it replaces.

    Layers are packed one after the other, so that memory peaks at one layer above the model. quantization: none, int8 or int4; int8
    and int4 need the native library. The head may keep more bits (HEAD_BITS).
    """
    for module in model.modules():
        if isinstance(module, HeadLinear):
            module.pack()
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    # Parents and names only: a list of the layers would keep their weights alive.
    sites = [
        (parent, name, HEAD_BITS.get(quantization, quantization) if child is head else quantization)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _packable(child)
    ]
    del head
    if not sites:
        logger.warning(
            "%s: no linear layer can be packed: torch computes them, which is slow on a CPU (%s)",
            type(model).__name__,
            "--dtype bfloat16 or float32 is faster"
            if next(model.parameters()).dtype not in DTYPES
            else "their weights are of a library's own kind",
        )
        return 0
    make = maker_for([getattr(parent, name).weight for parent, name, _ in sites], [kind for _, _, kind in sites])
    if make is None:
        logger.warning("oneDNN cannot pack these weights at CPU level %s: linear layers stay unpacked and slow", cpu_level())
        return 0
    count = 0
    for parent, name, kind in sites:
        try:
            setattr(parent, name, _pack(getattr(parent, name), make, kind))
            count += 1
        except RuntimeError as error:
            logger.warning("%s: %s.%s stays unpacked and slow: %s", type(model).__name__, type(parent).__name__, name, error)
    if count < len(sites):
        logger.warning("%d of %d linear layers stay unpacked, in the dtype of the model", len(sites) - count, len(sites))
    return count


def _packable(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and is_plain(layer) and layer.weight.dtype in DTYPES and layer.weight.device.type == "cpu"


def maker_for(weights: Sequence[torch.Tensor], quantizations: Sequence[str] | None = None) -> Make | None:
    """Return a function that packs `weights` [outputs, inputs] (of DTYPES, on a CPU) into one arena; None if nothing here can.

    quantizations: of each weight; None: none of any.
    """
    kinds = quantizations or ["none"] * len(weights)
    if native() is None:
        plain = set(kinds) == {"none"} and all(can_pack(weight.dtype) for weight in weights)
        return (lambda weight, bias, quantization="none": PackedLinear(weight, bias)) if plain else None
    arena = Arena(sum(room(packed_bytes(weight.shape, weight.dtype, kind)) for weight, kind in zip(weights, kinds, strict=True)))
    return lambda weight, bias, quantization="none": NativeLinear(weight, bias, quantization=quantization, arena=arena)


@torch.inference_mode()
def _pack(layer: nn.Linear, make: Make, quantization: str) -> nn.Module:
    """Return the packed layer. Raises RuntimeError if it cannot be made or gives other numbers."""
    weight, bias = layer.weight, layer.bias
    packed = make(weight, bias, quantization)
    inputs = sample_input(weight.shape[1], weight)
    if quantization == "none":
        outputs = len(weight)
        ends = sorted({*range(min(ENDS, outputs)), *range(max(outputs - ENDS, 0), outputs)})
        exact = functional.linear(inputs.float(), weight[ends].float(), None if bias is None else bias[ends].float())
        if refusal := find_refusal(packed(inputs)[..., ends], layer(inputs)[..., ends], exact):
            raise RuntimeError(refusal)
    elif isinstance(packed, NativeLinear) and (problem := _rounding_problem(packed, weight, inputs[0])):
        raise RuntimeError(f"in {quantization} {problem}")
    return packed


def _rounding_problem(packed: NativeLinear, weight: torch.Tensor, inputs: torch.Tensor) -> str:
    """Return what contradicts the promises of rounding; empty if nothing does. weight [outputs, inputs], inputs [n, inputs].

    int8: steps of 1/127 of the output's largest weight; int4: of 1/15 of the range of 32 weights, as a mean of squares. Inputs are
    rounded to steps of 1/127 of the largest of 32 or finer. So the weights, and then the products, are off by half a step at most.
    """
    if not packed.compute_float32(inputs).isfinite().all():
        return "its outputs are not finite"
    exact = weight[:CHECKED].float()
    rounded = packed.widen(0, len(exact))
    if packed.quantization == "int8":
        off, step = (rounded - exact).abs().amax(1), exact.abs().amax(1) / 127
    else:
        groups, differences = _groups(exact), _groups(rounded - exact)
        off, step = differences.square().mean(2).sqrt(), (groups.amax(2) - groups.amin(2)) / 15 + groups.abs().amax(2) * 2**-9  # float16
    if not (off <= step * 0.51).all():
        return "its weights are off by more than half a step"
    bias = 0 if packed.bias is None else packed.bias[:CHECKED].float()
    off = (packed.compute_float32(inputs)[:, :CHECKED] - bias - inputs.float() @ rounded.T).abs()
    step = (_groups(inputs.float()).abs().amax(2)[:, None] * _groups(rounded).abs().sum(2)[None]).sum(2) / 127
    return "" if (off <= step * 0.51 + torch.finfo(torch.float32).tiny).all() else "its products are off by more than half a step"


def _groups(rows: torch.Tensor) -> torch.Tensor:
    """Return [n, inputs] as [n, groups, 32], the last one filled up with zeros."""
    return functional.pad(rows, (0, -rows.shape[1] % GROUP)).view(len(rows), -1, GROUP)
