"""The library's linear layers against float64."""

import itertools

import pytest
import torch
from safetensors import safe_open
from tests.real_models import GEMMA3, real_folder
from torch import nn

from fairlead_worker.native.library import native
from fairlead_worker.native.linear import NativeLinear, packed_bytes
from fairlead_worker.native.memory import Arena, room

pytestmark = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (5, 33), (64, 64), (129, 100), (768, 31), (8193, 40)]
"""inputs, outputs: odd ones, fewer than a panel, more inputs than a run."""
ROWS = [1, 2, 11, 12, 13, 97, 200]
SUMMED = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""Of the largest output: the sum's own rounding, then the answer's."""


def make(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(inputs * outputs)
    return (
        (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype),
        torch.randn(outputs, generator=generator).to(dtype),
    )


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_sums_are_those_of_float64(inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> None:
    weight, added = make(inputs, outputs, dtype)
    layer = NativeLinear(weight, added if bias else None)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        want = x.double() @ weight.double().T + (added.double() if bias else 0)
        assert error(layer(x), want) <= SUMMED[dtype], rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_int8_is_the_rounded_weight_times_nearly_the_input(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    weight, added = make(inputs, outputs, dtype)
    layer = NativeLinear(weight, added, quantization="int8")
    scale = weight.double().abs().amax(1, keepdim=True) / 127
    rounded = (weight.double() / scale).round() * scale
    assert layer.scales is not None
    torch.testing.assert_close(layer.scales.double(), scale[:, 0], rtol=1e-6, atol=0)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        # 1e-2 in bfloat16: its weights lie on halves at times, and a half may go either way.
        assert error(layer(x), x.double() @ rounded.T + added.double()) <= (1e-3 if dtype == torch.float32 else 1e-2), rows
        assert error(layer(x), x.double() @ weight.double().T + added.double()) <= 0.05, rows


def rounded_by_groups(x: torch.Tensor) -> torch.Tensor:
    """As ggml's Q8_0 with a float scale: of each 32 inputs the largest becomes 127. x [rows, inputs] -> the same, float64."""
    rows, inputs = x.shape
    groups = nn.functional.pad(x.float(), (0, -inputs % 32)).view(rows, -1, 32)
    most = groups.abs().amax(2, keepdim=True)
    factor = torch.full_like(most, 127) / most  # `127 / most` would round twice
    return ((groups * factor).nan_to_num(0).round().double() * (most / 127)).view(rows, -1)[:, :inputs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_int4_is_the_rounded_weight_times_the_input_in_8_bits(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    weight, added = make(inputs, outputs, dtype)
    layer = NativeLinear(weight, added, quantization="int4")
    rounded = layer.widen(0, outputs).double()
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        assert error(layer(x), rounded_by_groups(x) @ rounded.T + added.double()) <= SUMMED[dtype], rows


def groups_of(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] -> [groups, 32] in float64; inputs a multiple of 32."""
    return weight.double().view(-1, 32)


def from_lowest_to_highest(weight: torch.Tensor) -> torch.Tensor:
    """Round each group to 16 equal steps from its lowest to its highest weight: [groups, 32] in float64."""
    groups = groups_of(weight)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / 15
    return ((groups - low) / step).round() * step + low


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e5, 1e30])
@pytest.mark.parametrize("tail", [1, 3], ids=["normal", "outliers"])
def test_int4_is_nearer_than_steps_from_the_lowest_to_the_highest_weight(tail: int, size: float, dtype: torch.dtype) -> None:
    weight = (torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) ** tail * size).to(dtype)
    off = groups_of(NativeLinear(weight, None, quantization="int4").widen(0, 64)) - groups_of(weight)
    naive = from_lowest_to_highest(weight) - groups_of(weight)
    assert off.norm() <= 0.93 * naive.norm()
    assert (off.norm(dim=1) <= 1.05 * naive.norm(dim=1)).all()


@pytest.mark.parametrize("layer", [0, 17])
@pytest.mark.parametrize("name", ["mlp.down_proj", "self_attn.q_proj"])
def test_int4_is_nearer_to_trained_weights_too(name: str, layer: int) -> None:
    with safe_open(real_folder(GEMMA3) / "model.safetensors", "pt") as file:
        weight = file.get_tensor(f"model.layers.{layer}.{name}.weight")
    off = groups_of(NativeLinear(weight, None, quantization="int4").widen(0, len(weight))) - groups_of(weight)
    assert off.norm() <= 0.93 * (from_lowest_to_highest(weight).nan_to_num(0) - groups_of(weight)).norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int4_finds_weights_that_are_16_equal_steps(dtype: torch.dtype) -> None:
    codes = torch.randint(0, 16, (64, 256), generator=torch.Generator().manual_seed(1))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scale = torch.rand(64, 8).half().repeat_interleave(32, 1)
    exact = codes * scale.float() + (-7 * scale).float()  # a minimum that float16 holds
    got = NativeLinear(exact.to(dtype), None, quantization="int4").widen(0, 64)
    assert ((got - exact).abs() <= scale * (0 if dtype == torch.float32 else 2**-5)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_packed_weights_are_widened_exactly(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    weight, _ = make(inputs, outputs, dtype)
    begin, end = outputs // 3, outputs - outputs // 4
    assert torch.equal(NativeLinear(weight, None).widen(begin, end), weight[begin:end].float())
    layer = NativeLinear(weight, None, quantization="int8")
    assert layer.scales is not None
    scale = layer.scales[begin:end, None]
    whole = layer.widen(begin, end) / scale
    torch.testing.assert_close(whole, whole.round(), rtol=0, atol=1e-4)
    assert ((whole - weight[begin:end].float() / scale).abs() <= 0.501).all()
    with pytest.raises(IndexError, match=f"of {outputs}"):
        layer.widen(0, outputs + 1)


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_of_int4_are_exact(sign: int) -> None:
    """Eight products of 15 and 127 fill 16 bits nearly; ninth and tenth ones would not fit."""
    weight = torch.full((40, 96), 7 / 8)
    weight[:, ::32] = -1.0  # each group's largest: 7/8 is 15 of 0 to 15 then
    x = torch.full((3, 96), float(sign))
    assert NativeLinear(weight, None, quantization="int4")(x).tolist() == [[sign * 3 * (31 * 7 / 8 - 1)] * 40] * 3


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_tiny_inputs_are_zero_or_themselves(quantization: str) -> None:
    layer = NativeLinear(torch.full((3, 64), 1e30), None, quantization=quantization)
    answer = layer(torch.full((2, 64), 1e-38))
    assert ((answer == 0) | (answer.isclose(torch.tensor(64e-8), rtol=1e-2))).all()


def test_int4_keeps_a_weight_that_is_no_number_visible() -> None:
    weight = torch.randn(40, 64)
    weight[3, 5], weight[7, 40] = float("nan"), float("inf")
    answer = NativeLinear(weight, None, quantization="int4")(torch.randn(2, 64))
    assert sorted(set(torch.nonzero(~answer.isfinite())[:, 1].tolist())) == [3, 7]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(8193, 40), (129, 700)])
def test_a_rows_bits_depend_neither_on_its_company_nor_on_threads(inputs: int, outputs: int, dtype: torch.dtype, quantization: str) -> None:
    layer = NativeLinear(*make(inputs, outputs, dtype), quantization=quantization)
    x = torch.randn(200, inputs).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([layer(row[None]) for row in x])
        for threads, rows in itertools.product((1, 2, 5), (1, 7, 12, 13, 96, 97, 200)):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x[:rows]), alone[:rows]), (threads, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_and_leading_dimensions(dtype: torch.dtype) -> None:
    weight, added = make(70, 50, dtype)
    x = torch.randn(2, 3, 140).to(dtype)[..., ::2]
    straight, turned = NativeLinear(weight, added), NativeLinear(weight.T.contiguous().T, added)
    assert straight(x).shape == (2, 3, 50)
    assert torch.equal(straight(x), turned(x.contiguous()))
    assert straight(x[:, :0]).shape == (2, 0, 50)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible_in_its_row_alone(wrong: float, dtype: torch.dtype, quantization: str) -> None:
    layer = NativeLinear(*make(65, 40, dtype), quantization=quantization)
    x = torch.randn(3, 65).to(dtype)
    x[1, 64] = wrong
    answer = layer(x)
    assert not answer[1].isfinite().any()
    assert torch.equal(answer[[0, 2]], layer(x[[0, 2]]))


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    layer = NativeLinear(torch.ones(1, 2, dtype=torch.bfloat16), None)
    # 1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between the next two: both go to the even one.
    x = torch.tensor([[1, 2**-8], [1 + 2**-7, 2**-8], [1, 2**-8 + 2**-15]]).to(torch.bfloat16)
    assert layer(x)[:, 0].tolist() == [1, 1 + 2**-6, 1 + 2**-7]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_rounded_output_without_weights_is_zero(quantization: str) -> None:
    layer = NativeLinear(torch.zeros(3, 5), None, quantization=quantization)
    assert layer(torch.randn(2, 5)).tolist() == [[0.0] * 3] * 2
    assert layer(torch.zeros(2, 5)).tolist() == [[0.0] * 3] * 2


def test_wrong_inputs_are_refused() -> None:
    layer = NativeLinear(torch.zeros(3, 5), None)
    with pytest.raises(RuntimeError, match=r"torch.bfloat16 \[2, 5\]"):
        layer(torch.zeros(2, 5, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"torch.float32 \[2, 6\]"):
        layer(torch.zeros(2, 6))


def test_layers_share_an_arena_without_touching_each_other() -> None:
    weights = [torch.randn(outputs, 37) for outputs in (3, 64, 65)]
    arena = Arena(sum(room(packed_bytes(weight.shape, weight.dtype)) for weight in weights))
    layers = [NativeLinear(weight, None, arena=arena) for weight in weights]
    x = torch.randn(4, 37)
    for layer, weight in zip(layers, weights, strict=True):
        torch.testing.assert_close(layer(x), x @ weight.T)
        assert layer.memory[0].data_ptr() % 64 == 0
    with pytest.raises(ValueError, match="do not fit"):
        arena.take(4 << 20)
