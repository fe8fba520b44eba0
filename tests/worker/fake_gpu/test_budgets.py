"""What a step uses stays within `budgets.json`, for each family and dtype; what exceeds it is named.

A change that needs more has to write the budgets again, and so show it: `python -m tests.worker.fake_gpu.budgets`.
"""

import pytest
import torch
from tests.worker.fake_gpu.budgets import CASES, PIECES, PIECEWISE, exceeded, measure, read
from tests.worker.fake_gpu.device.gpu import CUDA, FakeGpu

from fairlead_worker.model.lowbit.int4 import MANY, int4_linear


@pytest.mark.parametrize("case", CASES)
def test_a_step_stays_within_its_budget(gpu: FakeGpu, case: str) -> None:
    budgets = read()[case]
    for step, parts in measure(gpu, case).items():
        for part, used in parts.items():
            assert exceeded(used, budgets[step][part]) == [], f"{case}, {step}, per {part}"


def test_every_kernel_of_a_fused_layer_is_needed() -> None:
    """Four products, two norms with their sums, rope, KV store, attention and the gated activation."""
    for step in ("decode", "prefill"):
        assert sum(read()["llama bf16"][step]["layer"].kernels.values()) == 10


def test_a_rank_has_as_many_kernels_as_one_gpu() -> None:
    """Two of them also sum over the ranks."""
    for step in ("decode", "prefill"):
        alone, rank = (read()[f"llama bf16{ranks}"][step]["layer"].kernels for ranks in ("", ", 2 ranks"))
        assert sum(alone.values()) == sum(rank.values()) and rank["flashinfer.allreduce_norm"] == 2


def test_float8_kv_costs_no_further_kernel_and_half_the_bytes() -> None:
    """Rounding is part of the store. Decodes read 100 tokens of 4 rows, with 2 heads of 64 (keys and values), in half the bytes."""
    for step in ("decode", "prefill"):
        plain, float8 = (read()[f"llama bf16{kind}"][step]["layer"] for kind in ("", ", fp8 KV"))
        assert sum(float8.kernels.values()) == sum(plain.kernels.values()) and float8.launches == plain.launches
        saved = 4 * 100 if step == "decode" else 64
        assert plain.bytes - float8.bytes >= saved * 2 * 2 * 64


def test_a_mixed_step_has_one_more_kernel_in_a_layer() -> None:
    """Its decodes and its chunk have a plan each."""
    mixed, chunk = (read()["llama bf16"][step]["layer"].kernels for step in ("mixed", "prefill"))
    assert mixed == chunk | {"flashinfer.decode": 1}


def test_experts_are_read_in_their_bits_and_their_rows_stay_in_place() -> None:
    """Of 8 experts (3 * 128 * 256 numbers each) 8 choices use 66 %, 128 all. Nothing gathers rows or puts them back."""
    for step, used in (("decode", 0.65), ("prefill", 0.99)):
        kinds = ("bf16", "fp8 in blocks", "fp8 experts, before 8.9", "MXFP4 experts")
        plain, *others = (read()[f"qwen3_moe {kind}"][step]["layer"] for kind in kinds)
        for narrow, saved in zip(others, (1, 1, 1.45), strict=True):
            assert sum(count for name, count in narrow.kernels.items() if name.startswith("triton.experts")) == 2
            assert not any(name.startswith(("_grouped_mm", "index_copy_")) for name in narrow.kernels)
            assert plain.bytes - narrow.bytes >= saved * used * 8 * 3 * 128 * 256
        assert sum(others[0].kernels.values()) <= sum(plain.kernels.values())


def test_a_layer_in_pieces_launches_its_attention_and_one_graph() -> None:
    """Whatever its kernels are: 10 in a layer of Llama, 25 in one of experts. A copy of the queries comes to them."""
    for case, steps in PIECES.items():
        for step in steps:
            plain, pieces = (read()[case][step + kind]["layer"] for kind in ("", PIECEWISE))
            assert pieces.launches == (3 if step == "mixed" else 2) and pieces.waits == 0
            assert sum(pieces.kernels.values()) == sum(plain.kernels.values()) + 1 and plain.launches == sum(plain.kernels.values())
            assert pieces.kernels.get("copy_", 0) == plain.kernels.get("copy_", 0) + 1


def test_low_bit_weights_are_read_in_their_bits() -> None:
    plain, fp8, int4 = (read()[f"llama {dtype}"]["decode"]["layer"] for dtype in ("bf16", "fp8", "int4"))
    assert any("float8" in name for name in fp8.kernels) and not any(name.startswith(("mm", "addmm")) for name in fp8.kernels)
    assert any("int4" in name for name in int4.kernels) and not any(name.startswith(("mm", "addmm")) for name in int4.kernels)
    assert int4 == read()["llama int4 in groups"]["decode"]["layer"], "torchao's weights become the layers of AWQ and GPTQ"
    blocks = read()["llama fp8 in blocks"]["decode"]["layer"]
    for each in (fp8, blocks):
        assert sum(each.kernels.values()) == 11, "as in 16 bits, and the inputs of o_proj are rounded"
    assert blocks.bytes < plain.bytes and any("float8" in name for name in blocks.kernels)
    assert fp8.bytes < plain.bytes


def test_weights_in_4_bits_are_stacked_and_read_in_17_of_128_bits() -> None:
    """8 numbers of 4 bits, and a scale and a zero of 16 bits for 128: 4.25 bits of 16, in decodes of 4 rows and in a chunk of 64."""
    weights = 256 * (512 + 256 + 1024 + 512)
    for ranks, group in ((1, ""), (2, ", 2 ranks")):
        for step in ("decode", "prefill"):
            plain, int4 = (read()[f"llama {kind}{group}"][step]["layer"] for kind in ("bf16", "int4 in groups"))
            assert sum(int4.kernels.values()) == sum(plain.kernels.values()) and int4.launches == plain.launches
            assert plain.bytes - int4.bytes == weights / ranks * (2 - 17 / 32)


def test_a_long_chunk_widens_each_weight_once(gpu: FakeGpu) -> None:
    layer = int4_linear(torch.empty(64, 256, dtype=torch.uint8, device=CUDA), *torch.empty(2, 64, 2, device=CUDA), None)
    for count, names in ((MANY, {"triton.multiply int4": 1}), (MANY + 1, {"triton.widen": 1, "mm bfloat16": 1})):
        gpu.record.clear()
        layer(torch.empty(count, 256, dtype=torch.bfloat16, device=CUDA))
        assert gpu.record.by_name() == names and not gpu.record.waits
    widened, product = gpu.record.kernels
    assert widened.bytes == 64 * 256 * (17 / 32 + 2) and product.bytes == 2 * (64 * 256 + (MANY + 1) * (256 + 64))
