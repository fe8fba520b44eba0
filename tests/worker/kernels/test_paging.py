"""The arrays that FlashInfer plans from, by hand and against the step they come from."""

import random
from itertools import pairwise

import pytest
import torch
from bench.gpu.batches import packed, steps

from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.paging import plan_pages

CPU = torch.device("cpu")


def test_a_mixed_step_by_hand() -> None:
    """A prompt that fills its page, a chunk over three pages, a decode that opens a page."""
    paging = plan_pages(packed([(0, 4), (3, 6), (8, 1)], [[7], [2, 9, 4], [1, 5, 0]], 4, CPU), 4)
    assert paging.query_indptr.tolist() == [0, 4, 10, 11]
    assert paging.page_indptr.tolist() == [0, 1, 4, 7]
    assert paging.page_indices.tolist() == [7, 2, 9, 4, 1, 5, 0]
    assert paging.last_page_len.tolist() == [4, 1, 1]
    assert paging.rows.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]
    assert paging.positions.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 8]
    assert not paging.single and plan_pages(packed([(8, 1), (0, 1)], [[1, 5, 0], [3]], 4, CPU), 4).single


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_every_token_is_found_through_the_arrays_where_the_step_puts_it(page_size: int) -> None:
    spec = KVSpec((LayerSpec(1, 1, 64, 64, 1.0),), page_size, torch.bfloat16, CPU)
    for seed in range(5):
        for step in steps(spec, 4000, random.Random(seed)):
            paging = plan_pages(step, page_size)
            parts = (paging.query_indptr, paging.page_indptr, paging.page_indices, paging.last_page_len, paging.rows, paging.positions)
            assert all(part.dtype == torch.int32 and part.device == CPU and part.is_contiguous() for part in parts)
            assert torch.equal(paging.positions.long(), step.positions)
            places = paging.page_indptr[paging.rows.long()] + paging.positions // page_size
            assert torch.equal(paging.page_indices[places.long()].long() * page_size + paging.positions % page_size, step.slots)
            lengths = (paging.page_indptr.diff() - 1) * page_size + paging.last_page_len
            assert lengths.tolist() == [start + count for start, count in zip(step.starts, step.counts, strict=True)]
            assert [end - begin for begin, end in pairwise(paging.query_indptr.tolist())] == list(step.counts)
