"""The predicted steps follow from the counts, and the documentation shows those of this code."""

import pytest
from bench.gpu.predicted_steps import H200, HARDWARE, PAGE_FILE, kernel_seconds, predict, predictions, sampling_seconds, table
from tests.worker.fake_gpu.device.record import Kernel, Record


def test_the_page_shows_what_the_model_predicts() -> None:
    """`python -m bench gpu/predicted_steps --write` writes it again."""
    one, many = predictions("Llama 3.2 1B", (1, 64), ())
    assert 2.47 < one.gigabytes < 2.6, "1.24 billion weights of two bytes, and the KV of one request"
    kv = 2 * 16 * 8 * 64 * 2 * 2048 / 1e9  # keys and values of 16 layers, 8 heads of 64, in two bytes
    assert 62.9 < (many.gigabytes - one.gigabytes) / kv < 70, "a graph reads the KV of the step that it replays"
    for row in table([one, many]).splitlines()[2:]:
        assert row in PAGE_FILE.read_text(encoding="utf-8")


def test_the_results_show_what_the_model_predicts_for_an_h100() -> None:
    """`python -m bench gpu/predicted_steps --gpu H100 --models 'Llama 3.1 8B' --prompts 512 8128` prints it."""
    found = predictions("Llama 3.1 8B", (1, 64), (512, 8128), HARDWARE["H100"])
    _, _, section = (PAGE_FILE.parent / "gpu-results.md").read_text(encoding="utf-8").partition("## Predicted beside measured")
    shown = [row.split(" | ") for row in section.splitlines() if row.startswith(("| decode", "| prefill"))]
    assert [(row[0].removeprefix("| "), row[1]) for row in shown] == [(one.step, f"{one.step_ms:.2f}") for one in found]
    assert found[-1].device_ms > 1.3 * predictions("Llama 3.1 8B", (64,), ())[0].device_ms, "its memory is slower"


def test_the_page_shows_the_times_of_sampling() -> None:
    for vocabulary in (128_256, 151_936):
        for gpu, hardware in HARDWARE.items():
            times = " | ".join(f"{sampling_seconds(256, vocabulary, passes, hardware) * 1e6:.0f}" for passes in (1, 2))
            assert f"| {vocabulary:,} | {gpu} | {times} |" in PAGE_FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kernel", "ranks", "seconds"),
    [
        (Kernel("mm bfloat16", 3_696_000_000, 0, "bfloat16"), 1, 1e-3),
        (Kernel("mm bfloat16", 0, int(989e9 * 0.76), "bfloat16"), 1, 1e-3),
        (Kernel("flashinfer.prefill fa3", 0, int(989e9 * 0.29), "bfloat16"), 1, 1e-3),
        (Kernel("flashinfer.decode", 4_176_000_000, 0, "bfloat16"), 1, 1e-3),
        (Kernel("_scaled_mm float8_e4m3fn", 0, int(1979e9 * 0.76), "float8_e4m3fn"), 1, 1e-3),
        (Kernel("_weight_int4pack_mm int4", 100, int(5.5e9 * 64 / 9), "int4"), 1, 1e-3),
        (Kernel("add", 100, 0, ""), 1, 3e-6),
        (Kernel("all_reduce", 100, 0, ""), 4, 10e-6),
        (Kernel("all_reduce", 522_000_000, 0, ""), 4, 1e-3),
        (Kernel("flashinfer.allreduce_norm", 100, 0, ""), 4, 7e-6),
        (Kernel("flashinfer.allreduce_norm", 522_000_000, 0, ""), 4, 1e-3),
    ],
)
def test_a_kernel_takes_the_longest_of_its_limits(kernel: Kernel, ranks: int, seconds: float) -> None:
    assert kernel_seconds(kernel, H200, ranks) == pytest.approx(seconds, rel=1e-6)


def test_a_step_takes_the_longer_of_device_and_host() -> None:
    kernels = [Kernel("add", 100, 0, "")] * 100
    assert predict("", "decode 1", Record(kernels, 100), 1).step_ms == pytest.approx(2.5), "launched one by one"
    assert predict("", "decode 1", Record(kernels, 1), 1).step_ms == pytest.approx(0.3), "in a graph"
