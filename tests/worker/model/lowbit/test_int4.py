"""Linear layers in 4 bits: the layout and the arithmetic of torch's kernel, stacks and parts, and devices that multiply wrong."""

from collections.abc import Callable

import pytest
import torch
from tests.worker.model.lowbit.int4_reference import layout, multiply
from torch import nn

from fairlead_worker.model.layers.stack import Stack
from fairlead_worker.model.lowbit import int4
from fairlead_worker.model.lowbit.int4 import (
    FEW,
    MANY,
    ROWS,
    Int4Linear,
    Kernels,
    int4_linear,
    int4_problem,
    keep_int4,
    pack,
    scales_and_zeros,
    tiles_of,
    trial_problem,
    unpack,
    unsupported,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply by torch's kernel for CPUs, and widen by torch."""
    monkeypatch.setattr(Int4Linear, "multiply", multiply)
    monkeypatch.setattr(int4, "kernels", lambda device: Kernels(int4.widen))


def drawn(*shape: int, most: int = 16, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def layer_of(outputs: int, inputs: int, group: int, *, seed: int = 2, order: torch.Tensor | None = None, bias: bool = False) -> Int4Linear:
    generator = torch.Generator().manual_seed(seed)
    scale = 0.01 + torch.rand(outputs, inputs // group, generator=generator) / 50
    zero = drawn(outputs, inputs // group, seed=seed + 1)
    offsets = torch.randn(outputs, generator=generator) if bias else None
    return int4_linear(drawn(outputs, inputs, seed=seed), scale, zero, offsets, order)


def rows_of(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)


@pytest.mark.parametrize(("inputs", "tiles"), [(256, 8), (192, 4), (96, 2)])
def test_codes_lie_where_the_kernel_looks_for_them(inputs: int, tiles: int) -> None:
    codes = drawn(16, inputs)
    assert tiles_of(inputs) == tiles
    assert torch.equal(pack(codes), layout(codes, tiles))
    assert torch.equal(unpack(pack(codes)), codes)


@pytest.mark.parametrize("inputs", [256, 192, 96])
def test_torchs_own_packing_has_the_same_shape(inputs: int) -> None:
    pairs = torch.empty(16, inputs // 2, dtype=torch.uint8, device="meta")
    assert torch.ops.aten._convert_weight_to_int4pack(pairs, tiles_of(inputs)).shape == pack(drawn(16, inputs)).shape


def test_a_zero_point_costs_at_most_the_rounding_that_is_documented() -> None:
    """(code - zero point) * scale against (code - 8) * scale + zero, for each code and zero point, and scales of all mantissas."""
    scale = (1 + torch.arange(128) / 128).to(torch.bfloat16)
    for zero_point in range(17):
        zero = scales_and_zeros(scale[:, None], torch.full((128, 1), zero_point))[0, :, 1].double()
        off = (zero - (8 - zero_point) * scale.double()).abs() / scale.double()
        exact = abs(8 - zero_point) in (0, 1, 2, 4, 8)
        assert bool((off == 0).all()) == exact
        assert off.max() <= 7 * 2**-8


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_numbers_are_rounded_once(group: int) -> None:
    codes, scale = drawn(24, 512), torch.rand(24, 512 // group) + 0.1
    zero = drawn(24, 512 // group, most=17, seed=9)
    layer = int4_linear(codes, scale, zero, None)
    assert layer.group == group and layer.weight.nbytes == 24 * 512 // 2 and layer.pairs.nbytes == 4 * 24 * 512 // group
    steps = layer.pairs.double().transpose(0, 1).repeat_interleave(group, 1)
    exact = (codes.double() - 8) * steps[..., 0] + steps[..., 1]
    assert torch.equal(layer.numbers(), exact.to(torch.bfloat16).float())
    want = (codes.double() - zero.repeat_interleave(group, 1)) * scale.double().repeat_interleave(group, 1)
    step = scale.double().repeat_interleave(group, 1)
    # 2**-8 of the number, of a scale that counts up to 8 times, and of the zero.
    assert ((layer.numbers() - want).abs() <= 2**-8 * (want.abs() + (8 + 8) * step) * 1.01).all()


def test_groups_of_other_sizes_have_their_scales_repeated() -> None:
    codes, scale, zero = drawn(8, 768), torch.rand(8, 2) + 0.1, drawn(8, 2)
    layer = int4_linear(codes, scale, zero, None)
    assert layer.group == 128
    fine = int4_linear(codes, scale.repeat_interleave(3, 1), zero.repeat_interleave(3, 1), None)
    assert torch.equal(layer.numbers(), fine.numbers())


@pytest.mark.parametrize("ordered", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("count", [0, 1, ROWS, ROWS + 1])
def test_few_and_many_rows_multiply_the_same_numbers(count: int, ordered: bool) -> None:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1)) if ordered else None
    layer = layer_of(48, 128, 32, order=order, bias=True)
    rows = rows_of(count, 128)
    want = rows.double() @ layer.numbers().double().T + layer.bias.double()
    got = layer(rows[None])
    assert got.shape == (1, count, 48) and got.dtype == torch.bfloat16
    if count:
        assert (got[0] - want).norm() <= 5e-3 * want.norm()


def test_the_order_of_inputs_matters() -> None:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    layer, plain = layer_of(16, 128, 32, order=order), layer_of(16, 128, 32)
    assert torch.equal(layer.numbers()[:, order], plain.numbers()) and not torch.equal(layer.numbers(), plain.numbers())


def test_stacks_and_their_parts_are_the_layers() -> None:
    parts = [layer_of(outputs, 128, 64, seed=seed, bias=True) for seed, outputs in ((1, 32), (2, 8), (3, 16))]
    assert all(parts[0].matches(part) for part in parts)
    stack = Stack(parts)
    inputs = rows_of(3, 128)
    assert torch.equal(stack(inputs), torch.cat([part(inputs) for part in parts], -1))
    begin = 0
    for part in parts:
        own = stack.linear.part(begin, begin + part.out_features)
        assert torch.equal(own.numbers(), part.numbers()) and torch.equal(own(inputs), part(inputs))
        begin += part.out_features


def test_layers_of_other_groups_or_orders_are_not_stacked() -> None:
    order = torch.arange(127, -1, -1)
    layer = layer_of(16, 128, 64, order=order)
    assert layer.matches(layer_of(8, 128, 64, order=order.clone()))
    for other in (
        layer_of(16, 128, 64),
        layer_of(16, 128, 32, order=order),
        layer_of(16, 128, 64, order=torch.arange(128)),
        layer_of(16, 256, 64),
    ):
        assert not layer.matches(other) and not other.matches(layer)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((16, 128, 4), ""),
        ((16, 4096, 1), ""),
        ((12, 128, 4), "12 outputs"),
        ((16, 100, 1), "100 inputs"),
        ((16, 128, 8), "groups of 16 inputs"),
        ((16, 96, 2), "groups of 48 inputs"),
    ],
)
def test_sizes_that_the_kernel_cannot_take(sizes: tuple[int, int, int], reason: str) -> None:
    found = unsupported(*sizes)
    assert found.startswith(reason) and bool(found) == bool(reason)


def swapped_codes(layer: Int4Linear, rows: torch.Tensor) -> torch.Tensor:
    other = Int4Linear(layer.weight.flip(3), layer.pairs, None, layer.kernels)
    return multiply(other, rows)


def zeros_left_out(layer: Int4Linear, rows: torch.Tensor) -> torch.Tensor:
    other = Int4Linear(layer.weight, layer.pairs * torch.tensor([1.0, 0.0], dtype=torch.bfloat16), None, layer.kernels)
    return multiply(other, rows)


@pytest.mark.parametrize("faulty", [swapped_codes, zeros_left_out])
def test_a_kernel_that_multiplies_wrong_is_found(
    faulty: Callable[[Int4Linear, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trial_problem(CPU) == ""
    monkeypatch.setattr(Int4Linear, "multiply", faulty)
    assert "its products of 3 rows are" in trial_problem(CPU)


def test_a_widened_weight_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4, "kernels", lambda device: Kernels(lambda weight, pairs: int4.widen(weight, pairs).flip(1)))
    assert f"its products of {MANY + 1} rows are" in trial_problem(CPU)


def test_a_triton_product_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        int4, "kernels", lambda device: Kernels(int4.widen, lambda rows, weight, pairs: multiplied(rows, weight, pairs.flip(0)))
    )
    assert f"its products of {ROWS} rows are" in trial_problem(CPU)


def multiplied(rows: torch.Tensor, weight: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    return rows @ int4.widen(weight, pairs).T


@pytest.mark.parametrize(("inputs", "many"), [(128, MANY), (96, ROWS)], ids=["Triton", "no kernel of Triton for these inputs"])
def test_each_number_of_rows_has_its_way(inputs: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def fused(rows: torch.Tensor, weight: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        taken.append("triton")
        return multiplied(rows, weight, pairs)

    def few(layer: Int4Linear, rows: torch.Tensor) -> torch.Tensor:
        taken.append("torch")
        return multiply(layer, rows)

    def wide(weight: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        taken.append("widened")
        return int4.widen(weight, pairs)

    monkeypatch.setattr(int4, "kernels", lambda device: Kernels(wide, fused))
    monkeypatch.setattr(Int4Linear, "multiply", few)
    layer = layer_of(16, inputs, 32, bias=True)
    for count in (FEW, FEW + 1, many, many + 1):
        rows = rows_of(count, inputs)
        want = rows.float() @ layer.numbers().T + layer.bias.float()
        assert (layer(rows).float() - want).norm() <= 5e-3 * want.norm()
    assert taken == ["torch", *(["triton"] * 2 if many == MANY else ["torch"] * 2), "widened"]


def test_old_devices_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert int4_problem(CPU) == "the kernel is for GPUs"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert int4_problem(torch.device("cuda")) == "the GPU's compute capability is 7.5, and the kernel needs 8.0"


def test_torchaos_tensor_is_kept_and_stacked_without_its_filling() -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="the extra gpu is not installed")
    codes, scale, zero = drawn(16, 256), torch.rand(16, 2) + 0.1, drawn(16, 2)
    wide = pack(nn.functional.pad(codes, (0, 1024 - 256)))
    pairs = nn.functional.pad(scales_and_zeros(scale, zero), (0, 0, 0, 0, 0, 8 - 2))
    model = nn.Sequential(nn.Linear(256, 16))
    model[0].weight = nn.Parameter(torchao.Int4TilePackedTo4dTensor(wide, pairs, [1, 128], torch.Size((16, 256))), requires_grad=False)
    assert keep_int4(model) == 1
    layer = model[0]
    assert isinstance(layer, Int4Linear) and layer.bias is not None
    assert torch.equal(layer.numbers(), int4_linear(codes, scale, zero, None).numbers())
