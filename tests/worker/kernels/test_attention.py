"""The portable backends against attention written out by hand, over mixed steps with scattered pages."""

import itertools
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep, pad_page_count
from fairlead_worker.kernels.cpu import CpuBackend
from fairlead_worker.kernels.native import NativeBackend
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.native.library import native

PAGES = 200
BACKENDS = (ReferenceBackend, CpuBackend, NativeBackend)
Kind = type[ReferenceBackend] | type[CpuBackend] | type[NativeBackend]
needs_library = pytest.mark.skipif(native() is None, reason="the compiled kernels need a CPU level of avx2 or higher, and gcc")
every_backend = pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=kind.name, marks=needs_library if kind is NativeBackend else ()) for kind in BACKENDS]
)
BFLOAT16_ERROR = 0.02
"""Of outputs of about 1: scores and weights rounded to 8 bits of mantissa, as in transformers' own eager attention."""


def naive(spec: LayerSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int) -> torch.Tensor:
    """One query [heads, key_dim] over keys and values [L, kv_heads, dim], in float64."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    first = first if spec.chunk is None else position - position % spec.chunk
    repeats = spec.heads // spec.kv_heads
    key = keys[first : position + 1].double().repeat_interleave(repeats, 1)
    value = values[first : position + 1].double().repeat_interleave(repeats, 1)
    scores = torch.einsum("hd,lhd->hl", query.double(), key) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.sinks is not None:
        scores = torch.cat((scores, torch.tensor(spec.sinks).double()[:, None]), 1)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, : len(key)], value)


def packed(rows: Sequence[tuple[int, int]], tables: Sequence[list[int]], page_size: int) -> PackedStep:
    positions = [p for start, count in rows for p in range(start, start + count)]
    slots = [
        table[p // page_size] * page_size + p % page_size
        for (start, count), table in zip(rows, tables, strict=True)
        for p in range(start, start + count)
    ]
    used = [table[: -(-(start + count) // page_size)] for (start, count), table in zip(rows, tables, strict=True)]
    return PackedStep(
        tokens=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        starts=[start for start, _ in rows],
        counts=[count for _, count in rows],
        page_indptr=torch.tensor([0, *itertools.accumulate(map(len, used))], dtype=torch.int32),
        page_indices=torch.tensor([page for table in used for page in table], dtype=torch.int32),
        sampling=torch.empty(0, dtype=torch.int64),
    )


class Bench:
    """Requests with known keys and values, and a backend into which they go step by step."""

    def __init__(
        self, spec: LayerSpec, page_size: int, lengths: Sequence[int], kind: Kind = ReferenceBackend, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.layer = spec
        self.page_size = page_size
        self.backend = kind(KVSpec((spec,), page_size, dtype, torch.device("cpu")), PAGES)
        self.error = {"atol": 2e-6, "rtol": 2e-5} if dtype == torch.float32 else {"atol": BFLOAT16_ERROR, "rtol": BFLOAT16_ERROR}
        free = random.Random(5).sample(range(PAGES), PAGES)
        self.tables = [[free.pop() for _ in range(-(-length // page_size))] for length in lengths]
        self.queries = [torch.randn(length, spec.heads, spec.key_dim).to(dtype) for length in lengths]
        self.keys = [torch.randn(length, spec.kv_heads, spec.key_dim).to(dtype) for length in lengths]
        self.values = [torch.randn(length, spec.kv_heads, spec.value_dim).to(dtype) for length in lengths]
        if spec.value_in_key:
            self.values = [key[..., : spec.value_dim] for key in self.keys]

    def step(self, rows: dict[int, tuple[int, int]]) -> list[torch.Tensor]:
        """Run rows of {request: (start, count)}; returns each row's output."""
        spans = list(rows.values())

        def take(source: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([source[i][start : start + count] for i, (start, count) in rows.items()])

        context = self.backend.plan(packed(spans, [self.tables[i] for i in rows], self.page_size))
        output = context.attend(0, take(self.queries), take(self.keys), take(self.values))
        return list(output.split([count for _, count in spans]))

    def share(self, leader: int, follower: int, pages: int) -> None:
        """The follower begins as the leader does, in the leader's pages."""
        self.tables[follower][:pages] = self.tables[leader][:pages]
        for known in (self.keys, self.values):
            known[follower][: pages * self.page_size] = known[leader][: pages * self.page_size]

    def check(self, rows: dict[int, tuple[int, int]]) -> None:
        for (i, (start, count)), output in zip(rows.items(), self.step(rows), strict=True):
            for offset in range(count):
                position = start + offset
                want = naive(self.layer, self.queries[i][position], self.keys[i], self.values[i], position)
                torch.testing.assert_close(output[offset].double(), want, **self.error)


LAYERS = {
    "multi-head": LayerSpec(4, 4, 16, 16, 0.25),
    "grouped": LayerSpec(8, 2, 16, 16, 0.25),
    "one KV head, odd sizes": LayerSpec(6, 1, 24, 8, 0.3),
    "latents": LayerSpec(6, 1, 20, 12, 0.3, value_in_key=True),
    "window": LayerSpec(4, 2, 16, 16, 0.25, window=7),
    "window of a token": LayerSpec(4, 2, 16, 16, 0.25, window=1),
    "chunks": LayerSpec(4, 2, 16, 16, 0.25, chunk=7),
    "softcap": LayerSpec(4, 2, 16, 16, 0.25, softcap=2.0),
    "sinks": LayerSpec(8, 2, 16, 16, 0.25, sinks=(-1.0, 0.0, 1.5, 3.0, 100.0, -100.0, 0.5, 2.0)),
    "sinks and window": LayerSpec(4, 2, 16, 16, 0.25, window=10, sinks=(-1.0, 0.0, 1.5, 3.0)),
    "softcap and window": LayerSpec(4, 2, 16, 16, 0.25, window=10, softcap=2.0),
}


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_mixed_step_attends_as_written_out_by_hand(layer: LayerSpec, page_size: int, dtype: torch.dtype, kind: Kind) -> None:
    bench = Bench(layer, page_size, [40, 33, 20, 37, 9, 40], kind, dtype)
    bench.check({0: (0, 32), 1: (0, 32), 3: (0, 36), 4: (0, 5)})
    bench.check({0: (32, 1), 2: (0, 11), 1: (32, 1), 4: (5, 4), 3: (36, 1)})
    bench.check({2: (11, 9), 0: (33, 7), 5: (0, 40)})


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_rows_read_what_other_rows_of_their_step_store(layer: LayerSpec, dtype: torch.dtype, kind: Kind) -> None:
    """Before and behind them in the step, and what those share with others again; one token is a decode to some backends."""
    bench = Bench(layer, 4, [50, 41, 60, 62, 33], kind, dtype)
    for leader, follower, pages in ((0, 1, 8), (0, 2, 12), (2, 3, 14), (0, 4, 8)):
        bench.share(leader, follower, pages)
    bench.check({1: (32, 9), 3: (56, 6), 0: (0, 50), 4: (32, 1), 2: (48, 12)})


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["grouped", "window", "softcap and window", "softcap"])
def test_long_chunks(name: str, dtype: torch.dtype, kind: Kind) -> None:
    bench = Bench(LAYERS[name], 16, [150, 210], kind, dtype)
    bench.check({0: (0, 150), 1: (0, 48)})
    bench.check({1: (48, 162)})


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_gives_the_same_bits_alone_and_in_company(kind: Kind, dtype: torch.dtype) -> None:
    lengths = [50, 61, 64, 130, 7]
    layer = LAYERS["grouped"]
    alone, together = Bench(layer, 16, lengths, kind, dtype), Bench(layer, 16, lengths, kind, dtype)
    prefill = {i: (0, n - 1) for i, n in enumerate(lengths)}
    for bench in (alone, together):
        bench.step(prefill)
    decode = {i: (n - 1, 1) for i, n in enumerate(lengths)}
    outputs = together.step(decode)
    for i, row in decode.items():
        assert torch.equal(alone.step({i: row})[0], outputs[i])


@every_backend
def test_what_an_earlier_owner_left_in_a_page_is_not_seen(kind: Kind) -> None:
    layer = LAYERS["grouped"]
    bench = Bench(layer, 16, [20, 21], kind)
    for storage in (*bench.backend.keys, *bench.backend.values):
        storage.fill_(1e4)
    bench.check({0: (0, 19), 1: (0, 20)})
    bench.check({0: (19, 1), 1: (20, 1)})


@every_backend
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_behind_the_window_are_not_used(kind: Kind, page_size: int, batch_invariant: bool) -> None:
    """A cache by groups gives them to other requests, whose KV may be broken."""
    layer = LAYERS["sinks and window"]
    bench = Bench(layer, page_size, [75, 64, 50], kind)
    if isinstance(bench.backend, CpuBackend):
        bench.backend.batch_invariant = batch_invariant
    bench.step({0: (0, 67), 1: (0, 50), 2: (0, 43)})
    gone = [page for table, start in zip(bench.tables, (67, 50, 43), strict=True) for page in table[: (start - 10 + 1) // page_size]]
    bench.backend.write_pages(torch.tensor(gone), torch.full((len(gone), bench.backend.spec.page_width), math.nan))
    bench.check({0: (67, 1), 2: (43, 1), 1: (50, 14)})


@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_groups_are_split_when_scratch_memory_is_short(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_worker.kernels.cpu.GROUP_TOKENS", tokens)
    bench = Bench(LAYERS["grouped"], 16, [33] * 5, CpuBackend)
    bench.check(dict.fromkeys(range(5), (0, 32)))
    bench.check(dict.fromkeys(range(5), (32, 1)))


def test_padding_is_at_most_a_quarter_and_sizes_are_few() -> None:
    assert all(pages <= pad_page_count(pages) < pages * 1.25 for pages in range(1, 5000))
    assert len({pad_page_count(pages) for pages in range(1, 4097)}) <= 4 * math.log2(4096) + 1


def test_page_bytes_count_every_layer() -> None:
    layers = (LayerSpec(8, 2, 64, 64, 0.125), LayerSpec(8, 1, 32, 16, 0.125))
    spec = KVSpec(layers, 16, torch.bfloat16, torch.device("cpu"))
    assert spec.page_bytes == (2 * 128 + 48) * 16 * 2
    assert spec.pages_for(spec.page_bytes * 3 + 1) == 3


@pytest.mark.parametrize("page_size", [0, 65])
def test_page_size_out_of_range_is_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 64"):
        KVSpec((), page_size, torch.float32, torch.device("cpu"))


@every_backend
def test_pages_take_memory_when_they_are_used_not_before(kind: Kind) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    layers = (LayerSpec(heads=4, kv_heads=4, key_dim=64, value_dim=64, scaling=0.125),)
    spec = KVSpec(layers=layers, page_size=16, dtype=torch.bfloat16, device=torch.device("cpu"))
    before = resident()
    backend = kind(spec, (512 << 20) // spec.page_bytes)
    assert resident() - before < 64 << 20
    assert all(not tensor[..., :1, :].any() for tensor in (*backend.keys, *backend.values))
