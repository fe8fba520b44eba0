"""A packed step as the arrays that FlashInfer plans from. Pure: tensors on the CPU in, tensors on the CPU out.

FlashInfer's `plan` computes its schedule on the host and would copy device tensors back to it, which waits for all work queued before:
so everything here stays on the CPU (docs.flashinfer.ai, "kv-layout": page tables as CSR, and the length of each row's last page).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from fairlead_worker.kernels.base import PackedStep


@dataclass(frozen=True, slots=True)
class Paging:
    """R rows of T tokens. All int32 on the CPU."""

    query_indptr: torch.Tensor
    """[R + 1]: row r's queries are tokens `query_indptr[r] : query_indptr[r + 1]` of the step."""
    page_indptr: torch.Tensor
    """[R + 1]: its pages are `page_indices[page_indptr[r] : page_indptr[r + 1]]`."""
    page_indices: torch.Tensor
    """[pages]"""
    last_page_len: torch.Tensor
    """[R]: tokens in its last page once this step's are stored, 1 to page_size."""
    rows: torch.Tensor
    """[T]: whose each token is."""
    positions: torch.Tensor
    """[T]: each token's position in its row's KV, where its own goes."""
    single: bool
    """Every row has one query: a step of decodes alone."""


def plan_pages(step: PackedStep, page_size: int) -> Paging:
    """The arrays of `step`, whose page tables are exactly as long as its rows need (`PackedStep.page_indptr`)."""
    starts, counts = np.array(step.starts, np.int32), np.array(step.counts, np.int32)
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions = np.arange(indptr[-1], dtype=np.int32) + (starts - indptr[:-1])[rows]
    return Paging(
        query_indptr=torch.from_numpy(indptr),
        page_indptr=step.page_indptr,
        page_indices=step.page_indices,
        last_page_len=torch.from_numpy((starts + counts - 1) % np.int32(page_size) + 1),
        rows=torch.from_numpy(rows),
        positions=torch.from_numpy(positions),
        single=bool((counts == 1).all()),
    )


def pinned(paging: Paging) -> Paging:
    """The same in pinned memory, which torch keeps until copies from it are over: they go to the device without waiting."""
    parts = ("query_indptr", "page_indptr", "page_indices", "last_page_len", "rows", "positions")
    return replace(paging, **{name: getattr(paging, name).pin_memory() for name in parts})
