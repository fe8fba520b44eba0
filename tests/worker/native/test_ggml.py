"""Linear layers of ggml's blocks against the package gguf, which reads blocks on its own."""

import itertools

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from tests.worker.native.test_linear import SUMMED, error, rounded_by_groups

from fairlead_worker.native.ggml import BLOCK_TYPES, PLAIN, GgmlLinear, Parts, dequantize_rows, packed_ggml_bytes
from fairlead_worker.native.library import native
from fairlead_worker.native.memory import Arena, room

pytestmark = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 3, 11, 12, 13, 97, 200]
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Bytes at which the float16 numbers of a block begin."""
each_type = pytest.mark.parametrize("ggml_type", sorted(BLOCK_TYPES))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def blocks_of(ggml_type: str, outputs: int, inputs: int, seed: int = 0, size: float = 0.01) -> torch.Tensor:
    """Draw rows whose codes and factors take every value. size: of scales and minima."""
    generator = torch.Generator().manual_seed(seed)
    if ggml_type in PLAIN:
        rows = (torch.randn(outputs, inputs, generator=generator) * size).to(PLAIN[ggml_type])
        return rows.view(torch.uint8)
    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[ggml_type]]
    blocks = torch.randint(0, 256, (outputs, inputs // per_block, block_bytes), dtype=torch.uint8, generator=generator)
    for at in HALVES[ggml_type]:
        blocks[..., at : at + 2] = (torch.randn(*blocks.shape[:2], 1, generator=generator) * size).half().view(torch.uint8)
    return blocks.reshape(outputs, -1)


def numbers(blocks: torch.Tensor, ggml_type: str) -> torch.Tensor:
    """Return rows of blocks as [outputs, inputs] float32, by gguf."""
    return torch.from_numpy(np.array(quants.dequantize(blocks.numpy(), GGMLQuantizationType[ggml_type])))


def stacked(parts: Parts) -> torch.Tensor:
    return torch.cat([numbers(*part) for part in parts])


@each_type
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 1), (512, 33), (1280, 128)])
def test_packed_blocks_are_widened_exactly(ggml_type: str, inputs: int, outputs: int) -> None:
    blocks = blocks_of(ggml_type, outputs, inputs)
    want = numbers(blocks, ggml_type)
    assert torch.equal(dequantize_rows(blocks, ggml_type, inputs), want)
    layer = GgmlLinear([(blocks, ggml_type)], inputs, None, dtype=torch.float32)
    assert torch.equal(layer.widen(0, outputs), want)
    assert torch.equal(layer.widen(outputs // 2, outputs), want[outputs // 2 :])


@pytest.mark.parametrize("bits", range(0, 1 << 16, 1 << 10))
def test_every_scale_is_read_exactly(bits: int) -> None:
    """All float16 numbers: with subnormal ones, infinity and NaN."""
    blocks = torch.randint(0, 256, (1 << 10, 18), dtype=torch.uint8)
    blocks[:, 0], blocks[:, 1] = torch.arange(bits, bits + (1 << 10)) % 256, torch.arange(bits, bits + (1 << 10)) // 256
    torch.testing.assert_close(dequantize_rows(blocks, "Q4_0", 32), numbers(blocks, "Q4_0"), rtol=0, atol=0, equal_nan=True)


@each_dtype
@each_type
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 5), (768, 31), (8192, 40), (1024, 200)])
def test_sums_are_those_of_float64_for_inputs_in_8_bits(ggml_type: str, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    blocks, added = blocks_of(ggml_type, outputs, inputs), torch.randn(outputs)
    layer = GgmlLinear([(blocks, ggml_type)], inputs, added, dtype=dtype)
    weight = numbers(blocks, ggml_type).double()
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        assert error(layer(x), rounded_by_groups(x) @ weight.T + added.to(dtype).double()) <= SUMMED[dtype], rows


@pytest.mark.parametrize("inputs", [32, 96, 160])
@pytest.mark.parametrize("ggml_type", sorted(kind for kind in BLOCK_TYPES if not kind.endswith("K")))
def test_an_odd_number_of_blocks(ggml_type: str, inputs: int) -> None:
    blocks, x = blocks_of(ggml_type, 70, inputs), torch.randn(20, inputs)
    layer = GgmlLinear([(blocks, ggml_type)], inputs, None, dtype=torch.float32)
    assert error(layer(x), rounded_by_groups(x) @ numbers(blocks, ggml_type).double().T) <= SUMMED[torch.float32]


@each_type
def test_the_largest_sums_are_exact(ggml_type: str) -> None:
    """The highest and the lowest codes times 127 and -127: 16 bits would not hold all of them."""
    for byte in (0, 255, 0x80, 0x7F):
        blocks = torch.full_like(blocks_of(ggml_type, 32, 512), byte)
        of_each = blocks.view(32, 512 // GGML_QUANT_SIZES[GGMLQuantizationType[ggml_type]][0], -1)
        for at in HALVES[ggml_type]:
            of_each[..., at], of_each[..., at + 1] = 0, 0x3C  # 1.0
        layer = GgmlLinear([(blocks, ggml_type)], 512, None, dtype=torch.float32)
        for x in (torch.full((3, 512), 127.0), torch.full((3, 512), -127.0), 127.0 * (-1.0) ** torch.arange(512).expand(3, 512)):
            want = x.double() @ numbers(blocks, ggml_type).double().T
            torch.testing.assert_close(layer(x).double(), want, rtol=1e-6, atol=1e-6 * 127 * 512)


@each_dtype
@each_type
def test_outlier_channels(ggml_type: str, dtype: torch.dtype) -> None:
    """Inputs of 1e5 beside small ones, and weights of 600: other groups keep their accuracy."""
    blocks = blocks_of(ggml_type, 64, 1024, size=0.01)
    wide = blocks.view(64, 1024 // GGML_QUANT_SIZES[GGMLQuantizationType[ggml_type]][0], -1)
    for at in HALVES[ggml_type]:
        wide[:, 1, at : at + 2] = torch.tensor([20.0]).half().view(torch.uint8)
    x = torch.randn(13, 1024) * torch.logspace(-3, 2, 1024)
    x[:, 700] = 1e5
    layer = GgmlLinear([(blocks, ggml_type)], 1024, None, dtype=dtype)
    x = x.to(dtype)
    assert error(layer(x), rounded_by_groups(x) @ numbers(blocks, ggml_type).double().T) <= SUMMED[dtype]


@each_dtype
@each_type
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible_in_its_row_alone(wrong: float, ggml_type: str, dtype: torch.dtype) -> None:
    layer = GgmlLinear([(blocks_of(ggml_type, 40, 256), ggml_type)], 256, None, dtype=dtype)
    x = torch.randn(3, 256).to(dtype)
    x[1, 77] = wrong
    answer = layer(x)
    assert not answer[1].isfinite().any()
    assert torch.equal(answer[[0, 2]], layer(x[[0, 2]]))


@each_type
def test_a_scale_that_is_no_number_stays_visible_in_its_output_alone(ggml_type: str) -> None:
    blocks = blocks_of(ggml_type, 40, 512)
    at = HALVES[ggml_type][-1]
    blocks[7, at : at + 2] = torch.tensor([float("nan")]).half().view(torch.uint8)
    answer = GgmlLinear([(blocks, ggml_type)], 512, None, dtype=torch.float32)(torch.randn(2, 512))
    assert answer[:, 7].isnan().all()
    assert answer.isfinite().sum() == 2 * 39


@each_dtype
@each_type
def test_a_rows_bits_depend_neither_on_its_company_nor_on_threads(ggml_type: str, dtype: torch.dtype) -> None:
    layer = GgmlLinear([(blocks_of(ggml_type, 200, 768), ggml_type)], 768, None, dtype=dtype)
    x = torch.randn(100, 768).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([layer(row[None]) for row in x])
        for threads, rows in itertools.product((1, 2, 5), (1, 5, 7, 12, 13, 96, 97, 100)):
            torch.set_num_threads(threads)
            assert torch.equal(layer(x[:rows]), alone[:rows]), (threads, rows)
    finally:
        torch.set_num_threads(before)


STACKS = {
    "Gemma's q, k, v": [("Q5_0", 128), ("Q5_0", 32), ("Q8_0", 32)],
    "K quants": [("Q4_K", 64), ("Q4_K", 64), ("Q6_K", 64)],
    "all": [(kind, 32 * (1 + i % 3)) for i, kind in enumerate(sorted(BLOCK_TYPES))],
    "odd": [("Q4_0", 40), ("Q4_0", 7), ("Q6_K", 70), ("Q8_0", 3), ("Q5_1", 1), ("Q5_1", 90)],
    "plain beside blocks": [("F32", 40), ("Q4_1", 56), ("BF16", 32), ("F16", 64), ("Q8_0", 5)],
}


@each_dtype
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_parts_of_several_types_are_one_layer(stack: list[tuple[str, int]], dtype: torch.dtype) -> None:
    parts = [(blocks_of(kind, outputs, 512, seed), kind) for seed, (kind, outputs) in enumerate(stack)]
    arena = Arena(sum(room(packed_ggml_bytes(len(blocks), 512, kind)) for blocks, kind in parts))
    weight, added = stacked(parts), torch.randn(sum(len(blocks) for blocks, _ in parts)).to(dtype)
    layer = GgmlLinear(parts, 512, added, dtype=dtype, arena=arena)
    exact = torch.cat([torch.full((len(blocks),), kind in BLOCK_TYPES or dtype == torch.float32) for blocks, kind in parts])
    assert torch.equal(layer.widen(0, len(weight))[exact], weight[exact])
    torch.testing.assert_close(layer.widen(0, len(weight)), weight, rtol=2**-8, atol=0)
    x = torch.randn(100, 512).to(dtype)
    near, plain = rounded_by_groups(x) @ layer.widen(0, len(weight)).double().T, x.double() @ layer.widen(0, len(weight)).double().T
    got = layer(x).double() - added.double()
    off = torch.minimum((got - near).abs().amax(0), (got - plain).abs().amax(0))  # plain panels take inputs as they are
    assert off.max() <= 2 * SUMMED[dtype] * (near.abs().max() + added.abs().max())
    assert torch.equal(layer(x[:1]), layer(x)[:1])


@each_type
def test_a_packed_file_is_about_as_large_as_the_file(ggml_type: str) -> None:
    assert packed_ggml_bytes(256, 512, ggml_type) <= 1.03 * blocks_of(ggml_type, 256, 512).numel()


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no rows of 512 inputs in Q4_0: they take 288 contiguous bytes"):
        GgmlLinear([(blocks_of("Q4_1", 4, 512), "Q4_0")], 512, None, dtype=torch.float32)
    with pytest.raises(ValueError, match="they take whole blocks"):
        GgmlLinear([(torch.zeros(4, 144, dtype=torch.uint8), "Q4_K")], 288, None, dtype=torch.float32)
    with pytest.raises(KeyError):
        GgmlLinear([(torch.zeros(4, 84, dtype=torch.uint8), "Q2_K")], 256, None, dtype=torch.float32)
