"""What a step uses stays within `budgets.json`, for each family and dtype; what exceeds it is named.

A change that needs more has to write the budgets again, and so show it: `python -m tests.worker.fake_gpu.budgets`.
"""

import pytest
from bench.gpu.fake.gpu import FakeGpu
from tests.worker.fake_gpu.budgets import CASES, exceeded, measure, read


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


def test_low_bit_weights_are_read_in_their_bits() -> None:
    plain, fp8, int4 = (read()[f"llama {dtype}"]["decode"]["layer"] for dtype in ("bf16", "fp8", "int4"))
    assert any("float8" in name for name in fp8.kernels) and not any(name.startswith(("mm", "addmm")) for name in fp8.kernels)
    assert any("int4" in name for name in int4.kernels) and not any(name.startswith(("mm", "addmm")) for name in int4.kernels)
    blocks = read()["llama fp8 in blocks"]["decode"]["layer"]
    for each in (fp8, blocks):
        assert sum(each.kernels.values()) == 11, "as in 16 bits, and the inputs of o_proj are rounded"
    assert blocks.bytes < plain.bytes and any("float8" in name for name in blocks.kernels)
    assert fp8.bytes < plain.bytes  # int4 pads inputs to 1,024, which is more than these layers have
