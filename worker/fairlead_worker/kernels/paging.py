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


def pin(paging: Paging) -> Paging:
    """The same in pinned memory, which torch keeps until copies from it are over: they go to the device without waiting."""
    parts = ("query_indptr", "page_indptr", "page_indices", "last_page_len", "rows", "positions")
    return replace(paging, **{name: getattr(paging, name).pin_memory() for name in parts})


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the step's tokens stand among the queries of a plan that has more."""

    tokens: torch.Tensor
    """[Q] int64: which token each query is."""
    places: torch.Tensor
    """[T] int64: where each token's own query is."""


def pad_to_tile(paging: Paging, step: PackedStep, page_size: int, least: int) -> tuple[Paging, Tiles]:
    """The same with at least `least` queries in each row.

    What a row lacks are copies of its last token, which stand behind it with keys of any page (0): no query of its own sees those.
    """
    starts, counts = np.array(step.starts, np.int64), np.array(step.counts, np.int64)
    padded = np.maximum(counts, least)
    indptr = np.concatenate(([0], np.cumsum(padded)))
    first = np.concatenate(([0], np.cumsum(counts)))
    rows = np.repeat(np.arange(len(padded)), padded)
    tokens = first[rows] + np.minimum(np.arange(indptr[-1]) - indptr[rows], counts[rows] - 1)
    owners = paging.rows.numpy()
    places = indptr[owners] + np.arange(first[-1]) - first[owners]
    wanted = -(-(starts + padded) // page_size)
    tables = [np.pad(table.numpy(), (0, many - len(table))) for table, many in zip(step.tables(), wanted, strict=True)]
    wider = replace(
        paging,
        query_indptr=torch.from_numpy(indptr.astype(np.int32)),
        page_indptr=torch.from_numpy(np.concatenate(([0], np.cumsum(wanted))).astype(np.int32)),
        page_indices=torch.from_numpy(np.concatenate(tables).astype(np.int32)),
        last_page_len=torch.from_numpy(((starts + padded - 1) % page_size + 1).astype(np.int32)),
        single=False,
    )
    return wider, Tiles(torch.from_numpy(tokens), torch.from_numpy(places))
