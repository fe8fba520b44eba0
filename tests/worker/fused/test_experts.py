"""Experts in grouped products against the family's own code, with any routing, and as the parts of two ranks."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from bench.gpu import interpreter
from tests.worker.fused.test_fuse import LIMIT, stand_in
from tests.worker.model.fusing import TEXT, own_model, refusals, trial_exactly
from torch import nn

from fairlead_worker.model.fuse import fuse_layers
from fairlead_worker.model.fused.changes import Changes, Unfused
from fairlead_worker.model.fused.experts import GroupedExperts, fuse_experts
from fairlead_worker.model.fused.library import Library
from fairlead_worker.model.trial import trial

LIBRARY = cast(Library, SimpleNamespace(silu_and_mul=interpreter.silu_and_mul))


def experts_of(family: str) -> tuple[nn.Module, list[Any]]:
    model = own_model(family, torch.bfloat16)
    return model, [module for module in model.modules() if isinstance(getattr(module, "down_proj", None), nn.Parameter)]


def route(count: int, choices: int, experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(2)
    index = torch.stack([torch.randperm(experts, generator=drawn)[:choices] for _ in range(count)])
    return index, torch.rand(count, choices, generator=drawn).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_any_routing_gives_what_the_family_gives(family: str, dtype: torch.dtype) -> None:
    model, modules = experts_of(family)
    fuse_experts(model, LIBRARY, changes := Changes())
    module, forward = modules[0], modules[0].forward
    assert all(isinstance(part.forward, GroupedExperts) for part in modules)
    changes.undo()
    assert not any("forward" in vars(part) for part in modules)
    experts, width, _ = module.down_proj.shape
    inputs = torch.randn(7, width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    index, weights = route(7, 2, experts, dtype)
    same = torch.zeros_like(index) + torch.tensor([0, experts - 1])
    for chosen in (index, same):
        got, want = forward(inputs, chosen, weights).float(), module(inputs, chosen, weights).float()
        assert (got - want).norm() <= 0.02 * want.norm(), "also where most experts have no row"


def test_the_parts_of_ranks_give_the_whole() -> None:
    """A rank has half of each expert's inner values, of gate and of up."""
    model, modules = experts_of("qwen3_moe")
    fuse_experts(model, LIBRARY, Changes())
    whole = modules[0].forward
    assert isinstance(whole, GroupedExperts)
    half = whole.down.shape[2] // 2
    inputs = torch.randn(7, whole.down.shape[1], generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    index, weights = route(7, 2, len(whole.numbers), torch.bfloat16)
    total = torch.zeros(inputs.shape)
    for begin in (0, half):
        rows = torch.cat([torch.arange(begin, begin + half), torch.arange(begin, begin + half) + 2 * half])
        down = whole.down[:, :, begin : begin + half].contiguous()
        total += GroupedExperts(whole.gate_up[:, rows].contiguous(), down, whole.activate, whole.numbers)(inputs, index, weights).float()
    want = whole(inputs, index, weights).float()
    assert (total - want).norm() <= 0.02 * want.norm()


def test_a_model_with_fused_experts_says_the_same() -> None:
    model: Any = experts_of("qwen3_moe")[0]
    before, exact, (library, calls) = trial(model, LIMIT, TEXT), trial_exactly(model, LIMIT), stand_in()
    assert fuse_layers(model, library, LIMIT, TEXT, ("experts",)) == ("experts",)
    calls.update(dict.fromkeys(calls, 0))
    assert not refusals(trial(model, LIMIT, TEXT), before, exact)
    assert calls["silu_and_mul"] == len(model.model.layers)


def test_an_activation_that_is_another_one_is_found() -> None:
    model: Any = experts_of("qwen3_moe")[0]
    wrong = cast(Library, SimpleNamespace(silu_and_mul=interpreter.gelu_and_mul))
    with pytest.raises(Unfused, match="from float32"):
        fuse_experts(model, wrong, Changes())
