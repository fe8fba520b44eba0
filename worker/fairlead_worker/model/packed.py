"""Linear layers whose weights are laid out once for oneDNN, as torch.compile's freezing does it.

Measured on two cores of an AMD EPYC with AVX512-BF16 (bench/engine_steps.py): a layer of 8 rows takes about half the time of
`F.linear` in both dtypes, one of 256 rows half in float32 and nearly the same in bfloat16. A row's bits do not depend on how many
rows come along, which cannot be said of `F.linear`.
"""

import logging

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fairlead_worker.model.fuse import close, sample_input

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
ROWS = 16
"""oneDNN picks the layout for a number of rows. The one for 8 to 64 is as good as any for 1 to 264 rows; that for 1 is not."""


class PackedLinear(nn.Module):
    """`nn.Linear` with a weight that only oneDNN can read; the plain weight is gone."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out_features, in_features], bias [out_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # No parameters: opaque tensors cannot be moved, saved or viewed as others can.
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shape = inputs.shape[:-1]
        if not inputs.numel():  # a step in which no row samples leaves the head nothing to do
            return inputs.new_empty(*shape, self.out_features)
        single = inputs.numel() == self.in_features
        if single:  # oneDNN adds up one row alone in another order: other bits than in company (seen with 2,304 features)
            inputs = inputs.reshape(1, -1).expand(2, -1)
        answer: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")
        return answer[:1].view(*shape, self.out_features) if single else answer


def can_pack() -> bool:
    """Whether this build of torch has oneDNN and the two (private) operators."""
    return bool(torch._C._has_mkldnn) and all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))


def pack_linears(model: PreTrainedModel) -> int:
    """Replace the linear layers of `model` (on a CPU) in place; returns how many. Each is compared with the layer that it replaces."""
    if not can_pack():
        logger.warning("this torch has no oneDNN: linear layers stay unpacked, at about half the speed")
        return 0
    made = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D) and child.weight.dtype in DTYPES and child.weight.device.type == "cpu":
                packed = _pack(child)
                if packed is None:
                    logger.warning("%s: linear layers stay unpacked from %s.%s on", type(model).__name__, type(parent).__name__, name)
                    return made
                setattr(parent, name, packed)
                made += 1
    return made


@torch.inference_mode()
def _pack(layer: nn.Module) -> PackedLinear | None:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, torch.Tensor) and (bias is None or isinstance(bias, torch.Tensor))
    try:
        packed = PackedLinear(weight.T if isinstance(layer, Conv1D) else weight, bias)
        inputs = sample_input(packed.in_features, weight)
        if close(packed(inputs), layer(inputs)):
            return packed
        problem = "it gives other numbers"
    except RuntimeError as error:
        problem = str(error)
    logger.warning("a linear layer of %s cannot be packed: %s", tuple(weight.shape), problem)
    return None
