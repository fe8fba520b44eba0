"""An MLP's first half, with gates and without, against float64."""

import ctypes
import itertools
from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

from fairlead_worker.native.decoder import ACTIVATIONS, Activation
from fairlead_worker.native.library import native, pointer
from fairlead_worker.native.linear import NativeLinear, library

pytestmark = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")
both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""Of the largest answer: the sums' own rounding, then the answer's."""
FACTORS = (0.75, 1.25, 0.5)
"""Of xIELU: of its parabola, its exponential and x itself."""
EXACT = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
    "squared_relu": lambda x: relu(x).square(),
    "xielu": lambda x: torch.where(x > 0, FACTORS[0] * x * x, FACTORS[1] * (torch.expm1(x) - x)) + FACTORS[2] * x,
}


def gated(layer: NativeLinear, activation: str, x: torch.Tensor, threads: int = 2, gates: bool = True) -> torch.Tensor:
    width = layer.out_features // (1 + gates)
    answer = torch.full((len(x), width + 3), 7, dtype=x.dtype)
    i32, i64 = ctypes.c_int32, ctypes.c_int64
    library().fairlead_activate(
        i32(threads), ctypes.byref(layer.native), ctypes.byref(Activation(ACTIVATIONS.index(activation), *FACTORS)), i32(gates),
        pointer(x), i64(layer.in_features), i64(len(x)), pointer(answer), i64(width + 3),
    )  # fmt: skip
    assert answer[:, width:].eq(7).all(), "it wrote beyond its row"
    return answer[:, :width]


def make(inputs: int, width: int, dtype: torch.dtype, bias: bool = False, quantization: str = "none") -> tuple[NativeLinear, torch.Tensor]:
    """The layer, and its weight [2 * width, inputs + 1] in float64 with the bias as its last column."""
    weight, added = (torch.randn(2 * width, inputs) / inputs**0.5 * 3).to(dtype), torch.randn(2 * width).to(dtype)
    layer = NativeLinear(weight, added if bias else None, quantization=quantization)
    return layer, torch.cat((weight.double(), added.double()[:, None] * bias), 1)


def want(weight: torch.Tensor, activation: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = sums(weight, x).chunk(2, 1)
    return EXACT[activation](gate) * up


def sums(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x.double(), torch.ones(len(x), 1).double()), 1) @ weight.T


def error(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got.double() - right).abs().max() / right.abs().max())


@both
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("inputs", "width"), [(5, 32), (100, 96), (768, 2304)])
def test_gates_are_those_of_float64(inputs: int, width: int, activation: str, bias: bool, dtype: torch.dtype) -> None:
    layer, weight = make(inputs, width, dtype, bias)
    for rows in (1, 12, 13, 97, 200):
        x = torch.randn(rows, inputs).to(dtype)
        assert error(gated(layer, activation, x), want(weight, activation, x)) <= CLOSE[dtype], rows


@both
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [32, 77])
def test_without_gates_all_sums_are_activated(width: int, activation: str, dtype: torch.dtype) -> None:
    weight, bias = (torch.randn(width, 100) / 3).to(dtype), torch.randn(width).to(dtype)
    layer, exact = NativeLinear(weight, bias), torch.cat((weight.double(), bias.double()[:, None]), 1)
    for rows in (1, 13, 97):
        x = torch.randn(rows, 100).to(dtype)
        assert error(gated(layer, activation, x, gates=False), EXACT[activation](sums(exact, x))) <= CLOSE[dtype], rows


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_everywhere(activation: str) -> None:
    """Also where they are nearly zero, as GELU is far to the left; what is no number stays so."""
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([-1e4, 1e4, float("nan")])))
    got = gated(NativeLinear(x[:, None], None), activation, torch.ones(1, 1), gates=False)[0]
    torch.testing.assert_close(got, EXACT[activation](x.double()).float(), rtol=1e-6, atol=5e-7, equal_nan=True)


@both
@pytest.mark.parametrize(("quantization", "close"), [("int8", 0.05), ("int4", 0.3)])
def test_rounded_weights(dtype: torch.dtype, quantization: str, close: float) -> None:
    layer, weight = make(100, 96, dtype, quantization=quantization)
    x = torch.randn(30, 100).to(dtype)
    assert error(gated(layer, "silu", x), want(weight, "silu", x)) <= close


def test_what_is_no_number_stays_in_its_row() -> None:
    layer, weight = make(64, 32, torch.float32)
    x = torch.randn(4, 64)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    got = gated(layer, "silu", x)
    assert got[1].isnan().all()
    assert not got[2].isfinite().all()
    assert error(got[[0, 3]], want(weight, "silu", x[[0, 3]])) <= CLOSE[torch.float32]


@both
def test_gates_far_from_zero(dtype: torch.dtype) -> None:
    """Closed ones are zero, open ones pass all; nothing overflows on the way."""
    weight = torch.zeros(64, 2)
    weight[:32, 0], weight[32:, 1] = torch.linspace(-300, 300, 32), 1
    got = gated(NativeLinear(weight.to(dtype), None), "silu", torch.tensor([[1.0, 2.0]]).to(dtype))[0]
    torch.testing.assert_close(got.float(), 2 * silu(weight[:32, 0].to(dtype).float()), rtol=1e-2, atol=1e-5)


@both
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_rows_bits_depend_neither_on_its_company_nor_on_threads(dtype: torch.dtype, quantization: str) -> None:
    layer, _ = make(129, 352, dtype, quantization=quantization)
    x = torch.randn(200, 129).to(dtype)
    alone = torch.cat([gated(layer, "silu", row[None], 1) for row in x])
    for threads, rows in itertools.product((1, 2, 5), (1, 7, 12, 13, 96, 97, 200)):
        assert torch.equal(gated(layer, "silu", x[:rows].contiguous(), threads), alone[:rows]), (threads, rows)
