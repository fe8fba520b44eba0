"""A packed step as the arrays that FlashInfer plans from. Pure: CPU tensors in, CPU tensors out.

FlashInfer's `plan` computes its schedule on the host. It would copy device tensors back, which waits for all queued work, so everything
here stays on the CPU (docs.flashinfer.ai, "kv-layout": page tables as CSR, and the length of each row's last page).
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
    """[R + 1]: row r's pages are `page_indices[page_indptr[r] : page_indptr[r + 1]]`."""
    page_indices: torch.Tensor
    """[pages]"""
    last_page_len: torch.Tensor
    """[R]: tokens in each row's last page after this step's are stored, 1 to page_size."""
    rows: torch.Tensor
    """[T]: the row of each token."""
    positions: torch.Tensor
    """[T]: each token's position in its row's KV."""
    single: bool
    """Whether every row has one query: a decode-only step."""
    zeros: torch.Tensor | None = None
    """[T] of zeros on the device, if KV is stored in float8 (`float8.Float8Store`)."""
    others: tuple[torch.Tensor, ...] = ()
    """`page_indices` of each group of layers after the first one (`kernels/groups.py`). The rest is the same for all of them."""

    lengths: torch.Tensor | None = None
    """[R]: tokens of each row's KV after this step's are stored. Only plans over latents read it."""

    @property
    def each(self) -> "list[Paging]":
        """Return the arrays of each group of layers."""
        return [self, *(replace(self, page_indices=indices, others=()) for indices in self.others)]


def plan_pages(step: PackedStep, page_size: int) -> Paging:
    """Return the arrays of `step`, whose page tables are exactly as long as its rows need (`PackedStep.page_indptr`)."""
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
        others=tuple(group.page_indices for group in step.others),
        lengths=torch.from_numpy(starts + counts),
    )


def select_rows(paging: Paging, begin: int, end: int) -> Paging:
    """Return the arrays of rows `begin` to `end` alone, for a plan of their own."""
    first, last = int(paging.query_indptr[begin]), int(paging.query_indptr[end])
    pages = paging.page_indptr[begin : end + 1]
    chosen = slice(int(pages[0]), int(pages[-1]))
    return Paging(
        query_indptr=paging.query_indptr[begin : end + 1] - first,
        page_indptr=pages - pages[0],
        page_indices=paging.page_indices[chosen],
        last_page_len=paging.last_page_len[begin:end],
        rows=paging.rows[first:last] - begin,
        positions=paging.positions[first:last],
        single=last - first == end - begin,
        others=tuple(indices[chosen] for indices in paging.others),
        lengths=None if paging.lengths is None else paging.lengths[begin:end],
    )


def pad_rows(paging: Paging, rows: int) -> Paging:
    """Append rows without queries and pages until there are `rows`, which is what a graph was recorded with."""
    more = rows - len(paging.last_page_len)

    def longer(part: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(part, (0, more), value=value)

    return replace(
        paging,
        query_indptr=longer(paging.query_indptr, int(paging.query_indptr[-1])),
        page_indptr=longer(paging.page_indptr, int(paging.page_indptr[-1])),
        last_page_len=longer(paging.last_page_len, 1),
        single=False,
        lengths=None if paging.lengths is None else longer(paging.lengths, 0),
    )


def pin(paging: Paging) -> Paging:
    """Copy the arrays to pinned memory, from which copies to the device do not wait. torch keeps that memory until its copies complete."""
    parts = ("query_indptr", "page_indptr", "page_indices", "last_page_len", "rows", "positions")
    pinned = {name: getattr(paging, name).pin_memory() for name in parts}
    return replace(paging, **pinned, others=tuple(indices.pin_memory() for indices in paging.others))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Mapping between a step's tokens and the queries of a padded plan."""

    tokens: torch.Tensor
    """[Q] int64: the token of each query."""
    places: torch.Tensor
    """[T] int64: the query of each token."""


def pad_to_tile(paging: Paging, step: PackedStep, page_size: int, least: int) -> tuple[Paging, Tiles]:
    """Pad each row to at least `least` queries.

    The padding repeats a row's last token behind it, with page 0 as its keys: no query of the row itself sees those.
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
