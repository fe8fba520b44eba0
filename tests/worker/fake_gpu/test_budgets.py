"""What a step uses stays within `budgets.json`, for each family and dtype; what exceeds it is named.

A change that needs more has to write the budgets again, and so show it: `python -m tests.worker.fake_gpu.budgets`.
"""

import pytest
from bench.gpu.fake.gpu import FakeGpu
from tests.worker.fake_gpu.budgets import CASES, PIECES, PIECEWISE, exceeded, measure, read


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
    blocks = read()["llama fp8 in blocks"]["decode"]["layer"]
    for each in (fp8, blocks):
        assert sum(each.kernels.values()) == 11, "as in 16 bits, and the inputs of o_proj are rounded"
    assert blocks.bytes < plain.bytes and any("float8" in name for name in blocks.kernels)
    assert fp8.bytes < plain.bytes  # int4 pads inputs to 1,024, which is more than these layers have
