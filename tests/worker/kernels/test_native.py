"""The compiled backend: equal to `reference` on random steps, and its bits depend on a query's own KV and position alone."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.worker.kernels.test_attention import LAYERS, Bench, needs_library, packed

from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.native import KINDS, NativeBackend, serves
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.kernels.registry import make_backend

pytestmark = needs_library

LAYER = LayerSpec(6, 2, 64, 64, 0.125)
SORTS = {
    "80": LayerSpec(4, 2, 80, 80, 80**-0.5),
    "96": LayerSpec(3, 3, 96, 96, 96**-0.5),
    "128, seven to one": LayerSpec(7, 1, 128, 128, 128**-0.5),
    "256, capped": LayerSpec(4, 2, 256, 256, 1 / 16, softcap=20.0),
    "keys of 48, values of 33, window": LayerSpec(4, 4, 48, 33, 0.15, window=300),
    "keys of 15": LayerSpec(2, 1, 15, 7, 0.3, window=40),
    "chunks": LayerSpec(4, 2, 32, 32, 0.2, chunk=100),
    "latents": LayerSpec(20, 1, 72, 64, 0.15, value_in_key=True),
    "latents of an odd size": LayerSpec(3, 1, 39, 36, 0.2, value_in_key=True),
    "more heads than rows of a block": LayerSpec(100, 2, 16, 16, 0.25),
}
DTYPES = pytest.mark.parametrize("dtype", KINDS, ids=str)
ERRORS = {torch.float32: 4e-6, torch.bfloat16: 0.02}
NAN = float("nan")


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def rows_at_random(chance: random.Random, limit: int) -> dict[int, tuple[int, int]]:
    """A mixed step over requests 0 to 6: decoding, verifying a few tokens, chunks."""
    counts = [chance.choice((1, 1, 1, 1, 2, 5, 8, 9, chance.randrange(10, 200))) for _ in range(7)]
    return {i: (chance.randrange(limit - count + 1), count) for i, count in enumerate(counts) if chance.random() < 0.8}


@DTYPES
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layer", SORTS.values(), ids=SORTS)
def test_random_steps_equal_reference(layer: LayerSpec, page_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.worker.kernels.test_attention.PAGES", 10_000)
    chance = random.Random(page_size)
    lengths = [chance.choice((40, 300, 530)) for _ in range(7)]
    native = Bench(layer, page_size, lengths, NativeBackend, dtype)
    oracle = Bench(layer, page_size, lengths, ReferenceBackend, torch.float32)
    for bench in (native, oracle):
        bench.queries, bench.keys, bench.values = (
            [tensor.to(bench.backend.spec.dtype) for tensor in of] for of in (native.queries, native.keys, native.values)
        )
        bench.step({i: (0, length) for i, length in enumerate(lengths)})
    for _ in range(3):
        rows = {i: row for i, row in rows_at_random(chance, 530).items() if sum(row) <= lengths[i]} or {0: (0, 3)}
        for got, want in zip(native.step(rows), oracle.step(rows), strict=True):
            torch.testing.assert_close(got.float(), want, atol=ERRORS[dtype], rtol=ERRORS[dtype])


@DTYPES
def test_hundreds_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.worker.kernels.test_attention.PAGES", 2000)
    lengths = [1 + i * 7 % 50 for i in range(400)]
    bench = Bench(LAYERS["grouped"], 16, lengths, NativeBackend, dtype)
    bench.step({i: (0, length - 1) for i, length in enumerate(lengths) if length > 1})
    bench.check({i: (length - 1, 1) for i, length in enumerate(lengths)})


@DTYPES
@pytest.mark.parametrize("window", [None, 600])
def test_a_query_gives_the_same_bits_however_its_prompt_is_cut_and_paged(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.worker.kernels.test_attention.PAGES", 10_000)
    layer, length = replace(LAYER, window=window), 1500
    whole = Bench(layer, 16, [length], NativeBackend, dtype).step({0: (0, length)})[0]
    for page_size, cuts in ((16, (1, 7, 512, 256, 64, 1, 300, 1, 5)), (64, (1000,)), (5, (100, 1, 1, 900))):
        bench = Bench(layer, page_size, [length], NativeBackend, dtype)
        start = 0
        for count in (*cuts, length - sum(cuts) - 2, 1, 1):
            assert torch.equal(bench.step({0: (start, count)})[0], whole[start : start + count]), (page_size, start, count)
            start += count


@DTYPES
def test_rows_give_the_same_bits_alone_in_company_and_on_two_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    monkeypatch.setattr("tests.worker.kernels.test_attention.PAGES", 1000)
    lengths = [50, 1061, 64, 2130, 7, 513, 640]
    rows = {0: (49, 1), 1: (1060, 1), 2: (0, 64), 3: (2122, 8), 4: (2, 5), 5: (512, 1), 6: (600, 40)}
    bench = Bench(LAYER, 16, lengths, NativeBackend, dtype)
    bench.step({i: (0, length) for i, length in enumerate(lengths)})
    together = bench.step(rows)
    torch.set_num_threads(2)
    for again in (bench.step(rows), [bench.step({i: row})[0] for i, row in rows.items()]):
        assert all(torch.equal(one, other) for one, other in zip(together, again, strict=True))


@DTYPES
@pytest.mark.parametrize("page_size", [5, 16, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_what_others_left_is_never_read(dtype: torch.dtype, page_size: int, window: int | None) -> None:
    """NaN in every page, of strangers and of earlier owners alike, and in a page's slots beyond the row's tokens."""
    bench = Bench(replace(LAYER, window=window), page_size, [90, 37, 64], NativeBackend, dtype)
    for storage in (*bench.backend.keys, *bench.backend.values):
        storage.fill_(NAN)
    bench.check({0: (0, 60), 1: (0, 35), 2: (0, 63)})
    bench.check({0: (60, 13), 1: (35, 1), 2: (63, 1)})
    bench.check({0: (73, 1), 1: (36, 1)})


@DTYPES
def test_one_rows_nan_stays_its_own(dtype: torch.dtype) -> None:
    bench = Bench(LAYER, 16, [40, 40, 600], NativeBackend, dtype)
    bench.keys[1][20] = bench.values[1][30] = NAN
    bench.step({i: (0, n) for i, n in enumerate((39, 39, 599))})
    outputs = bench.step({0: (39, 1), 1: (39, 1), 2: (599, 1)})
    assert [bool(output.isnan().all()) for output in outputs] == [False, True, False]
    assert not outputs[0].isnan().any()


@DTYPES
def test_views_of_stacked_projections_and_other_layouts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec = KVSpec((LAYER,), 16, dtype, torch.device("cpu"))
    stacked = torch.randn(30, 10 * 64).to(dtype)
    views = [part.unflatten(1, (-1, 64)) for part in stacked.split([6 * 64, 2 * 64, 2 * 64], dim=1)]
    layouts = (views, [v.contiguous() for v in views], [v.transpose(0, 1).contiguous().transpose(0, 1) for v in views])
    step = packed([(0, 30)], [[3, 1]], 16)
    outputs = [NativeBackend(spec, 5).plan(step).attend(0, *layout) for layout in layouts]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert outputs[0].isfinite().all()


def test_it_serves_where_it_can_and_says_why_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KVSpec((LAYER,), 16, torch.float32, torch.device("cpu"))
    half = replace(spec, dtype=torch.float16)
    assert serves(spec)
    assert make_backend("auto", half, 2).name == "cpu"
    with pytest.raises(ValueError, match=r"float32 and bfloat16 on a CPU: not torch\.float16 on cpu; set --attention-backend auto"):
        make_backend("native", half, 2)
    monkeypatch.setattr("fairlead_worker.kernels.native.native", lambda: None)
    assert make_backend("auto", spec, 2).name == "cpu"
    with pytest.raises(ValueError, match="the library does not load, see the log"):
        make_backend("native", spec, 2)
