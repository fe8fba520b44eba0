"""Drafted tokens joined to one row of their request: the same attention as one row for each, with one read of its KV."""

import random
from dataclasses import replace

import pytest
import torch
from bench.gpu import interpreter
from bench.gpu.batches import packed, worst_error

from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.kernels.verification import join_rows

CPU = torch.device("cpu")
PAGES = 400
LLAMA = LayerSpec(4, 2, 64, 64, 0.125)
LAYERS = (LLAMA, replace(LLAMA, window=5, softcap=3.0), LayerSpec(2, 1, 80, 80, 0.1))


def drafted(requests: list[tuple[int, int]], page_size: int, seed: int = 1) -> PackedStep:
    """Return decodes of (tokens with KV, drafted tokens), a row for each token, on random pages."""
    free = random.Random(seed).sample(range(PAGES), PAGES)
    rows, tables = [], []
    for start, drafts in requests:
        table = [free.pop() for _ in range(-(-(start + drafts + 1) // page_size))]
        rows += [(start + place, 1) for place in range(drafts + 1)]
        tables += [table] * (drafts + 1)
    return packed(rows, tables, page_size, CPU)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rows_of_a_request_are_joined(page_size: int) -> None:
    requests = [(9, 2), (30, 0), (14, 4), (15, 0), (0, 1)]
    joined = join_rows(drafted(requests, page_size))
    assert joined is not None
    assert (joined.starts, joined.counts) == ([start for start, _ in requests], [1 + drafts for _, drafts in requests])
    assert [len(table) for table in joined.tables()] == [-(-(start + drafts + 1) // page_size) for start, drafts in requests]


def test_requests_that_share_a_prefix_stay_apart() -> None:
    """Their lengths follow each other, as those of two rows of one request do, but each writes to a page of its own."""
    assert join_rows(packed([(8, 1), (9, 1), (10, 1)], [[1, 2, 3], [1, 2, 4], [1, 2, 5]], 4, CPU)) is None
    assert join_rows(packed([(7, 1), (8, 1)], [[1, 2], [1, 3, 4]], 4, CPU)) is None
    assert join_rows(packed([(8, 1)], [[1, 2, 3]], 4, CPU)) is None


def test_beside_a_chunk_nothing_is_joined() -> None:
    assert join_rows(packed([(5, 1), (6, 1), (0, 3)], [[1, 2], [1, 2], [3]], 4, CPU)) is None


@pytest.mark.parametrize("scales", [None, (0.5, 1.0, 2.0)], ids=["16 bits", "float8"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_joined_rows_attend_as_rows_of_one_token(page_size: int, scales: tuple[float, ...] | None) -> None:
    spec = KVSpec(LAYERS, page_size, torch.bfloat16, CPU, scales)
    tested, oracle = FlashInferBackend(spec, PAGES, interpreter), ReferenceBackend(replace(spec, dtype=torch.float32), PAGES)
    steps = [packed([(0, 40)], [list(range(40))], page_size, CPU), drafted([(9, 2), (30, 0), (14, 4)], page_size)]
    error, _ = worst_error(tested, oracle, iter(steps), torch.Generator().manual_seed(4))
    assert error < 0.012
    planned = tested._wrappers[0, LLAMA].prefill._plan  # type: ignore[attr-defined]  # the interpreter's
    assert planned.query_indptr == [0, 3, 4, 9]


def test_deterministic_mode_joins_nothing() -> None:
    backend = FlashInferBackend(KVSpec((LLAMA,), 4, torch.bfloat16, CPU), PAGES, interpreter)
    backend.batch_invariant = True
    backend.plan(drafted([(9, 2)], 4))
    assert len(backend._wrappers[0, LLAMA].prefill._plan.query_indptr) == 4  # type: ignore[attr-defined]  # three rows
