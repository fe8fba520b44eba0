"""Recognition of norms by what they compute, with weights as trained models have them."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fairlead_worker.model.norm import read_norm

WEIGHTS = {
    "random": torch.ones(64),
    "trained Gemma": torch.cat([torch.linspace(-1.1, 30, 63), torch.tensor([740.0])]),
    "all large": torch.full((64,), 740.0),
    "zeros": torch.zeros(64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize(("family", "plus_one"), [(Gemma3RMSNorm, True), (LlamaRMSNorm, False)])
def test_gemmas_norm_is_told_from_others(family: type[nn.Module], plus_one: bool, weight: torch.Tensor, dtype: torch.dtype) -> None:
    norm = family(64, eps=1e-6)
    norm.weight.data = weight.clone()
    assert read_norm(norm.to(dtype)) == (1e-6, plus_one)
    assert norm.weight.dtype == dtype


@pytest.mark.parametrize("other", [nn.LayerNorm(64), nn.Linear(64, 64), nn.Identity()])
def test_what_is_no_norm_is_not_read(other: nn.Module) -> None:
    assert read_norm(other) is None
