"""Experts in 8 and 4 bits against the family's own code with the same numbers, with any routing, and as the parts of two ranks."""

from typing import Any

import pytest
import torch
from bench.gpu.models.low_bit_weights import narrow_experts
from tests.models import build_model
from tests.worker.model.lowbit.reference import ReferenceRounder

from fairlead_worker.model.formats.experts import find_experts
from fairlead_worker.model.lowbit.experts import ExpertWeights, LowBitExperts, PlainProduct, Scales, find_route
from fairlead_worker.model.lowbit.rows import GROUP, Rounder, TorchRounder

BITS = 0.02
"""Products of the same numbers, in another order and rounded to bfloat16."""
ROUNDED = 0.06
"""Inputs of both products rounded to float8: 2 to 3 % each."""


def experts_of(monkeypatch: pytest.MonkeyPatch, scales: Scales, rounder: Rounder | None) -> tuple[Any, LowBitExperts]:
    """Return a family's experts with the numbers of few bits, and the same in few bits."""
    model = build_model("qwen3_moe", hidden_size=GROUP, moe_intermediate_size=2 * GROUP, head_dim=64).to(torch.bfloat16)
    _, module = next(find_experts(model))
    parts = [narrow_experts(module.gate_up_proj.detach(), scales), narrow_experts(module.down_proj.detach(), scales)]
    for name, part in zip(("gate_up_proj", "down_proj"), parts, strict=True):
        getattr(module, name).data.copy_(part.numbers())
    return module, LowBitExperts(*parts, "silu_and_mul", PlainProduct(), rounder)


def route(tokens: int, choices: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(2)
    index = torch.stack([torch.randperm(experts, generator=drawn)[:choices] for _ in range(tokens)])
    inputs = torch.randn(tokens, GROUP, generator=drawn).to(torch.bfloat16)
    return inputs, index, torch.rand(tokens, choices, generator=drawn).to(torch.bfloat16)


@pytest.mark.parametrize("scales", Scales)
@pytest.mark.parametrize("way", ["widened", "rounded alone", "rounded with the activation"])
def test_any_routing_gives_what_the_family_gives(scales: Scales, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if scales is Scales.GROUPS and way != "widened":
        pytest.skip("inputs are not rounded beside MXFP4")
    blocks = scales is Scales.BLOCKS
    rounder = {"widened": None, "rounded alone": TorchRounder(blocks)}.get(way, ReferenceRounder(blocks))
    module, experts = experts_of(monkeypatch, scales, rounder)
    inputs, index, weights = route(7, 2, len(experts.numbers))
    same = torch.zeros_like(index) + torch.tensor([0, len(experts.numbers) - 1])
    for chosen in (index, same):
        for given in (weights, weights.float()):
            got, want = experts(inputs, chosen, given).float(), module(inputs, chosen, given).float()
            assert (got - want).norm() <= (BITS if rounder is None else ROUNDED) * want.norm(), "also where experts have no row"


def test_the_parts_of_ranks_give_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has a block of each expert's inner values, of gate and of up."""
    _, whole = experts_of(monkeypatch, Scales.BLOCKS, None)
    inputs, index, weights = route(7, 2, len(whole.numbers))
    total = torch.zeros(inputs.shape)
    for rank in (0, 1):
        rows = torch.cat([torch.arange(GROUP) + GROUP * place for place in (rank, 2 + rank)])
        columns = slice(rank * GROUP, rank * GROUP + GROUP)
        up = ExpertWeights(whole.gate_up.values[:, rows], whole.gate_up.scale[:, [rank, 2 + rank]], Scales.BLOCKS)
        down = ExpertWeights(whole.down.values[:, :, columns], whole.down.scale[:, :, [rank]], Scales.BLOCKS)
        total += LowBitExperts(up, down, "silu_and_mul", PlainProduct(), None)(inputs, index, weights).float()
    want = whole(inputs, index, weights).float()
    assert (total - want).norm() <= BITS * want.norm()


def test_four_bits_stand_for_what_compressed_tensors_says() -> None:
    compressor = pytest.importorskip("compressed_tensors.compressors.mxfp4").MXFP4PackedCompressor
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    weight = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(3))
    narrow = narrow_experts(weight, Scales.GROUPS)
    for expert in (0, 1):
        wide = helpers.unpack_fp4_from_uint8(narrow.values[expert], 16, 64, dtype=torch.float32)
        scale = compressor._decompress_scale(narrow.scale[expert], torch.float32)
        assert torch.equal(narrow.numbers()[expert], wide * scale.repeat_interleave(32, 1))
    assert (narrow.numbers() - weight).norm() <= 0.15 * weight.norm()


def test_a_route_names_each_pair_once() -> None:
    index = torch.tensor([[3, 0], [0, 1], [3, 1]])
    order, ends = find_route(index, torch.arange(5))
    assert ends.tolist() == [2, 4, 4, 6, 6] and ends.dtype == torch.int32
    assert index.reshape(-1)[order].tolist() == [0, 0, 1, 1, 3, 3] and sorted(order.tolist()) == list(range(6))
