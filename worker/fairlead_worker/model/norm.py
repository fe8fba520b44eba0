"""Recognition of root mean square norms by what they compute."""

from typing import NamedTuple

import torch
from torch import nn

from fairlead_worker.model.exact import widened


class NormForm(NamedTuple):
    """x / sqrt(mean(x²) + eps) * (weight, or weight + 1 as in Gemma)."""

    eps: float
    plus_one: bool


@torch.inference_mode()
def read_norm(module: nn.Module) -> NormForm | None:
    """Return the form of `module`; None if it is no root mean square norm over one dimension, without a bias.

    It runs in float32, and each number is compared by its own size. In bfloat16, or beside the largest number, a trained weight
    of 740 hides whether 1 is added to the others: Gemma 3 270M was computed without it.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float) or getattr(module, "bias", None) is not None:
        return None
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(3)).to(weight.device) * 3
    with widened(module):
        want = module(x)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    for plus_one in (False, True):
        off = (normed * (weight.float() + plus_one) - want).abs()
        if (off <= 1e-5 * want.abs() + 1e-5).all():
            return NormForm(eps, plus_one)
    return None
