"""KV in float8: both backends that hold it agree, its errors are those of the format, and pages are copied with their bits."""

import logging
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bench.gpu import interpreter
from bench.gpu.batches import packed, steps, worst_error

from fairlead_worker.execution.host import PlainHostStore
from fairlead_worker.kernels.base import FLOAT8, KVSpec, LayerSpec
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.float8 import round_to_float8
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.kernels.registry import make_backend

CPU = torch.device("cpu")
PAGES = 2000
LLAMA = LayerSpec(4, 2, 64, 64, 0.125)
LAYERS = (LLAMA, replace(LLAMA, window=9, softcap=3.0), LayerSpec(2, 1, 80, 80, 0.1), LayerSpec(8, 2, 128, 128, 0.1))
"""One kind that FlashInfer does not serve, on the same pages."""
SCALES = (1.0, 0.03, 0.5, 7.0)
ERROR = 0.012
"""Of 16-bit queries and outputs against float32, over the same float8 pages."""


def spec_of(dtype: torch.dtype = torch.bfloat16, scales: tuple[float, ...] | None = SCALES, page_size: int = 4) -> KVSpec:
    return KVSpec(LAYERS, page_size, dtype, CPU, scales)


def error_of(tested: FlashInferBackend | ReferenceBackend, oracle: ReferenceBackend, seed: int = 1) -> float:
    rounds = steps(tested.spec, PAGES, random.Random(seed), count=4, longest=40, requests=4)
    error, tokens = worst_error(tested, oracle, rounds, torch.Generator().manual_seed(seed))
    assert tokens > 20
    return error


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_flashinfer_attends_to_float8_pages_as_the_reference_does(page_size: int, batch_invariant: bool) -> None:
    tested = FlashInferBackend(spec_of(page_size=page_size), PAGES, interpreter)
    tested.batch_invariant = batch_invariant
    assert error_of(tested, ReferenceBackend(spec_of(torch.float32, page_size=page_size), PAGES)) < ERROR


def test_both_backends_store_the_same_bits() -> None:
    step = packed([(0, 9), (3, 1)], [[4, 2, 9], [1]], 4, CPU)
    stored = []
    for backend in (FlashInferBackend(spec_of(), 12, interpreter), ReferenceBackend(spec_of(), 12)):
        torch.manual_seed(0)
        for layer, kind in enumerate(LAYERS):
            parts = (torch.randn(10, heads, kind.key_dim).bfloat16() * 300 for heads in (kind.heads, kind.kv_heads, kind.kv_heads))
            backend.plan(step).attend(layer, *parts)
        stored.append(backend.read_pages(torch.arange(10)))
    assert torch.equal(*stored) and stored[0].any()


def test_float8_costs_the_precision_of_the_format_alone() -> None:
    """Three bits of mantissa: up to 1/16 of a key or value. Numbers that a scale puts out of range cost more."""
    wide = ReferenceBackend(spec_of(torch.float32, None), PAGES)
    error = error_of(ReferenceBackend(spec_of(torch.float32, (1.0,) * 4), PAGES), wide)
    assert 0.001 < error < 0.15
    assert error_of(ReferenceBackend(spec_of(torch.float32, (0.001,) * 4), PAGES), wide) > 0.2, "numbers above 0.448 saturate"


def test_numbers_out_of_range_saturate_and_a_scale_keeps_them() -> None:
    numbers = torch.tensor([-70_000.0, -448.0, 0.0, 300.0, 449.0, 70_000.0]).bfloat16()
    assert round_to_float8(numbers, 1.0).float().tolist() == [-448.0, -448.0, 0.0, 288.0, 448.0, 448.0]
    assert round_to_float8(numbers, 256.0).float().tolist() == [-288.0, -1.75, 0.0, 1.125, 1.75, 288.0]


def test_a_page_takes_half_the_memory_and_is_copied_with_its_bits() -> None:
    spec = spec_of()
    assert spec.page_bytes * 2 == spec_of(scales=None).page_bytes and spec.pages_for(1 << 20) == (1 << 20) // spec.page_bytes
    assert (spec.kv_dtype, spec.copy_dtype, spec.page_width) == (FLOAT8, torch.uint8, spec.page_bytes)
    backend = FlashInferBackend(spec, 6, interpreter)
    for part in (*backend.keys, *backend.values):
        part.view(torch.uint8).random_(0, 256)
    before = backend.read_pages(torch.arange(6))
    store = PlainHostStore(backend, 2)
    store.copy([(1, 0), (2, 1)], [(4, 0), (5, 1)])
    assert torch.equal(backend.read_pages(torch.arange(6)), before[[0, 1, 2, 3, 1, 2]])


def test_without_the_fused_kernel_torch_rounds(caplog: pytest.LogCaptureFixture) -> None:
    names = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper", "append_paged_kv_cache")
    library = SimpleNamespace(**{name: getattr(interpreter, name) for name in names})
    backend = FlashInferBackend(spec_of(), PAGES, library)  # type: ignore[arg-type]  # an earlier release
    with caplog.at_level(logging.WARNING):
        backend.prepare()
    assert "rounded by torch" in caplog.text and "rope_quantize_fp8_append_paged_kv_cache" in caplog.text
    assert len(backend.kinds) == 3, "no kind of layer is left out for it"
    assert error_of(backend, ReferenceBackend(spec_of(torch.float32), PAGES)) < ERROR


@pytest.mark.parametrize("name", ["auto", "cpu", "native"])
def test_a_cpu_refuses_it_and_says_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=r"--kv-cache-dtype fp8 is for GPUs.*leave it out.*--attention-backend reference"):
        make_backend(name, spec_of(), 4)
    assert make_backend("reference", spec_of(), 4).spec.scales == SCALES
