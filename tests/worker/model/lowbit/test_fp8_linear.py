"""Linear layers that multiply float8: their numbers, stacks, ranks' parts, and a whole model beside torchao's tensors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from bench.gpu import interpreter
from tests.worker.model.checkpoints import KEPT, save_quantized
from tests.worker.model.formats.alone import pretend_gpu
from tests.worker.model.fusing import TEXT, refusals, trial_exactly
from tests.worker.model.lowbit.reference import ReferenceRounder
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.model.fixed_rows import fix_rows
from fairlead_worker.model.formats import compressed
from fairlead_worker.model.fuse import KINDS, fuse_layers
from fairlead_worker.model.fused.library import Library
from fairlead_worker.model.layers.stack import Stack
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.lowbit import choose
from fairlead_worker.model.lowbit.linear import Fp8BlockLinear, Fp8Linear, keep_fp8, widen
from fairlead_worker.model.lowbit.rows import GROUP, TorchRounder, dequantized
from fairlead_worker.model.trial import trial
from fairlead_worker.sharding.group import Summed

LIMIT = 200
DROPPED = 2**-7
"""Outputs are rounded to bfloat16."""


def drawn(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(outputs: int, inputs: int, bias: bool = False, seed: int = 3) -> Fp8Linear:
    weight = drawn(outputs, inputs, seed=seed)
    scale = weight.abs().amax(1, keepdim=True) / 448
    offsets = drawn(outputs, seed=seed + 1).to(torch.bfloat16) if bias else None
    return Fp8Linear((weight / scale).to(torch.float8_e4m3fn), scale, offsets, torch.bfloat16, TorchRounder())


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(((got.float() - want).abs() <= DROPPED * want.abs().amax(-1, keepdim=True)).all())


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_rounded_numbers(bias: bool) -> None:
    layer, inputs = layer_of(48, 64, bias), drawn(2, 5, 64).to(torch.bfloat16)
    inputs[0, 1] *= 100
    want = dequantized(TorchRounder().round(inputs)) @ layer.numbers().T
    if layer.bias is not None:
        want = want + layer.bias.float()
    assert close(layer(inputs), want.view(2, 5, 48))
    assert layer(inputs[:, :0]).shape == (2, 0, 48)
    if not bias:
        assert not layer(torch.zeros_like(inputs)).any()


def test_a_token_is_rounded_by_its_own_largest_number() -> None:
    inputs = drawn(4, 64).to(torch.bfloat16) * torch.tensor([1, 1000, 0.001, 1])[:, None].to(torch.bfloat16)
    exact = inputs.float()
    numbers = dequantized(TorchRounder().round(inputs))
    assert ((numbers - exact).abs() <= 2**-4 * exact.abs() + 2**-10 * exact.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_stack_gives_what_its_parts_give(bias: bool) -> None:
    parts = [layer_of(size, 64, bias, seed) for seed, size in enumerate((48, 16, 16))]
    assert all(parts[0].matches(part) for part in parts) and not parts[0].matches(layer_of(16, 32, bias))
    assert not parts[0].matches(layer_of(16, 64, not bias)) and not parts[0].matches(nn.Linear(64, 16))
    inputs, stack = drawn(5, 64).to(torch.bfloat16), parts[0].stacked(parts[1:])
    assert torch.equal(stack(inputs), torch.cat([part(inputs) for part in parts], -1))
    assert torch.equal(stack.part(48, 64)(inputs), parts[1](inputs))


def test_the_parts_of_ranks_give_the_whole() -> None:
    """Column-wise ranks have some outputs; row-wise ranks some inputs, each rounded by the largest of the rank's own."""
    whole, inputs = layer_of(64, 128), drawn(5, 128).to(torch.bfloat16)
    assert torch.equal(torch.cat([whole.part(0, 32)(inputs), whole.part(32, 64)(inputs)], -1), whole(inputs))
    weight, scale = whole.weight.detach(), whole.scale
    ranks = [
        Fp8Linear(weight[:, begin : begin + 64].contiguous(), scale, None, torch.bfloat16, TorchRounder())(inputs[:, begin : begin + 64])
        for begin in (0, 64)
    ]
    exact = inputs.float() @ whole.numbers().T
    assert (ranks[0] + ranks[1] - exact).norm() <= 0.04 * exact.norm()


def test_a_bias_is_added_once_after_the_sum_over_ranks() -> None:
    layer, inputs = layer_of(64, 128, bias=True), drawn(5, 128).to(torch.bfloat16)
    assert layer.bias is not None
    bias, want = layer.bias.detach().clone(), layer(inputs)
    twice = SimpleNamespace(add=lambda tensor: tensor + tensor)  # two ranks with equal parts
    summed = Summed(layer, cast(Any, twice))
    assert (summed.in_features, summed.out_features) == (128, 64), "for adapters"
    assert close(summed(inputs), (2 * (want - bias) + bias).float())


def test_blocks_are_padded_and_widened() -> None:
    weight, scale = drawn(300, 384).to(torch.float8_e4m3fn), drawn(3, 3).abs()
    layer = Fp8BlockLinear(weight, scale, None, torch.bfloat16, TorchRounder(blocks=True))
    assert layer.scale.shape == (3, 4) and layer.scale.t().stride() == (1, 4), "as cuBLAS reads them"
    want = weight.float()
    for row, column in ((0, 0), (1, 2), (2, 1)):
        part = slice(row * GROUP, (row + 1) * GROUP), slice(column * GROUP, (column + 1) * GROUP)
        assert torch.equal(layer.numbers()[part], want[part] * scale[row, column])
    assert torch.equal(widen(weight, scale, (GROUP, GROUP)), layer.numbers())
    assert not layer.matches(layer), "an incomplete block cannot be followed by another layer's"
    whole = Fp8BlockLinear(weight[:256], scale[:2], None, torch.bfloat16, TorchRounder(blocks=True))
    assert torch.equal(whole.stacked([whole]).numbers(), torch.cat([whole.numbers()] * 2))


def test_rows_are_rounded_in_blocks() -> None:
    inputs = drawn(5, 256).to(torch.bfloat16)
    inputs[:, GROUP:] *= 1000
    rounded = TorchRounder(blocks=True).round(inputs)
    assert rounded.values.shape == (8, 256) and rounded.scale.shape == (8, 2) and rounded.scale.stride() == (1, 8)
    exact, numbers = inputs.float(), dequantized(rounded)
    assert numbers.shape == exact.shape
    assert ((numbers - exact).abs()[:, :GROUP] <= 2**-4 * exact.abs()[:, :GROUP] + 2**-10 * 5).all(), "not by the larger block"


@pytest.fixture
def rounder() -> ReferenceRounder:
    return ReferenceRounder()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounder: ReferenceRounder) -> PreTrainedModel:
    """A checkpoint that a GPU would multiply in float8."""
    pytest.importorskip("compressed_tensors", reason="the extra gpu is not installed")
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(compressed, "choose_rounder", lambda device: rounder)
    save_quantized(KEPT["a scale for each output, inputs rounded"], tmp_path)
    return load_model(str(tmp_path), dtype="bfloat16").model


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def test_layers_of_torchao_are_taken_over() -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="the extra gpu is not installed")
    model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 32)).to(torch.bfloat16).requires_grad_(False)
    weights = [model.get_parameter(f"{number}.weight").float() for number in (0, 1)]
    with patch("torchao.quantization.quant_api._check_hardware_support"):  # asks torch.cuda.is_available
        torchao.quantize_(model, torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow()))
    assert keep_fp8(model, torch.bfloat16, lambda _: TorchRounder()) == 2 and count(model, Fp8Linear) == 2
    for layer, weight in zip(model, weights, strict=True):
        assert isinstance(layer, Fp8Linear) and (layer.numbers() - weight).abs().max() <= 2**-4 * weight.abs().max()


def test_norms_and_activations_round_what_is_multiplied(model: PreTrainedModel, rounder: ReferenceRounder) -> None:
    assert count(model, Stack) == 4 and count(model, Fp8Linear) == 8
    before, exact = trial(model, LIMIT, TEXT), trial_exactly(model, LIMIT)
    names = [name for name in vars(Library) if not name.startswith("_")]
    library = cast(Library, SimpleNamespace(**{name: getattr(interpreter, name) for name in names}))
    assert fuse_layers(model, library, LIMIT, TEXT, KINDS) == ("norm", "activation"), "heads of 16 have no kernel"
    rounder.calls.clear()
    after = trial(model, LIMIT, TEXT)
    assert not refusals(after, before, exact)
    # The first norm follows no sum, the last one precedes the head; the inputs of o_proj are rounded alone.
    assert rounder.calls == {"add_norm": 3, "silu_and_mul": 2, "round": 3}


def test_a_hook_reads_what_was_not_rounded(model: PreTrainedModel) -> None:
    """An adapter of the last projection multiplies its inputs."""
    names = [name for name in vars(Library) if not name.startswith("_")]
    library = cast(Library, SimpleNamespace(**{name: getattr(interpreter, name) for name in names}))
    fuse_layers(model, library, LIMIT, TEXT)
    seen: list[Any] = []
    down = model.get_submodule("model.layers.0.mlp.down_proj")
    handle = down.register_forward_hook(lambda _, inputs, answer: seen.append(inputs[0].dtype))
    trial(model, LIMIT, TEXT)
    assert seen == [torch.bfloat16]
    handle.remove()
    assert fix_rows(model) >= 8
    trial(model, LIMIT, TEXT)


def test_without_triton_torch_rounds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU Triton finds no driver, as without a C compiler."""
    choose.choose_rounder.cache_clear()
    assert not choose.choose_rounder(torch.device("cpu")).fuses
    assert "torch rounds activations to float8, in four kernels each: Triton's do not run: " in caplog.text
    choose.choose_rounder.cache_clear()
