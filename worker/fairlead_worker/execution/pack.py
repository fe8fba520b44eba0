"""Packing: a step plan as packed tensors. Array operations cover all rows; Python only collects what each row holds."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fairlead_worker.cache.grouped_lease import PageTable
from fairlead_worker.cache.states import RowState
from fairlead_worker.kernels.base import GroupPages, HostArrays, PackedStep
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.scheduler.plan import Row, StepPlan

UNREAD = array("I", [0])
"""Stands for a token that only the device knows: it is filled in there."""


def pack(plan: StepPlan, page_size: int, device: torch.device) -> PackedStep:
    """Lay the rows of `plan` end to end.

    Raises ValueError if a row's page table is too short for its tokens.

    A row that speculates becomes several rows of one token. A backend stores a step's KV before it attends, so each of them sees the
    ones before it and has the same bits as a plain decode. So the verified tokens are the same in bfloat16 too.
    """
    rows = [single for row in plan.rows for single in _singles(row)] if plan.drafted else plan.rows
    starts = [row.start for row in rows]
    counts = [row.count for row in rows]
    first, many = np.array(starts, np.int64), np.array(counts, np.int64)
    ends = first + many
    indptr, indices = _page_table(rows, [row.pages for row in rows], -(-ends // page_size), ends, page_size)
    token_indptr = _offsets(many)
    positions = np.arange(token_indptr[-1]) + np.repeat(first - token_indptr[:-1], many)
    places, offsets = np.divmod(positions, page_size)
    slots = indices[places + np.repeat(indptr[:-1], many)].astype(np.int64) * page_size + offsets
    # The token arrays of requests grow and so cannot be viewed: each row's part is copied once.
    texts = [row.request.tokens[start:end] or UNREAD for row, start, end in zip(rows, starts, ends.tolist(), strict=True)]
    if plan.drafted:
        texts = [array("I", row.draft) if text is UNREAD else text for text, row in zip(texts, rows, strict=True)]
    tokens = b"".join(texts)
    adapters = [row.request.submit.adapter for row in rows]
    sampling = token_indptr[1:][np.array([row.samples for row in rows], bool)] - 1
    host = HostArrays(
        torch.from_numpy(np.frombuffer(tokens, np.uint32).astype(np.int64)),
        torch.from_numpy(positions),
        torch.from_numpy(slots),
        torch.from_numpy(sampling),
    )
    return PackedStep(
        tokens=to_device(host.tokens, device),
        positions=to_device(host.positions, device),
        slots=to_device(host.slots, device),
        starts=starts,
        counts=counts,
        page_indptr=torch.from_numpy(indptr),
        page_indices=torch.from_numpy(indices),
        sampling=to_device(host.sampling, device),
        adapters=adapters if any(adapters) else (),
        host=host,
    )


def pack_groups(plan: StepPlan, page_size: int, device: torch.device, groups: int) -> PackedStep:
    """Do the same for a model whose layers are in `groups` groups. A row of a warm-up has one table, which then serves all of them."""
    step = pack(plan, page_size, device)
    rows = [single for row in plan.rows for single in _singles(row)] if plan.drafted else plan.rows
    counts = np.array(step.counts, np.int64)
    ends = np.array(step.starts, np.int64) + counts
    assert step.host is not None, "it was packed on the host"
    places, offsets = np.divmod(step.host.positions.numpy(), page_size)
    places += np.repeat(step.page_indptr.numpy()[:-1], counts)
    others = []
    for group in range(groups - 1):
        tables = [row.pages.others[group] if isinstance(row.pages, PageTable) else row.pages for row in rows]
        _, indices = _page_table(rows, tables, -(-ends // page_size), ends, page_size)
        slots = torch.from_numpy(indices[places].astype(np.int64) * page_size + offsets)
        others.append(GroupPages(to_device(slots, device), torch.from_numpy(indices), slots))
    return replace(step, others=others)


def pack_states(plan: StepPlan, page_size: int, device: torch.device) -> PackedStep:
    """Do the same for a model with recurrent layers. The rows of one that speculates run one after the other there."""
    states = list[RowState | None]()
    for row in plan.rows:
        states += [row.state] if row.state is None or not row.state.drafted else row.state.singles(row.count)
    return replace(pack(plan, page_size, device), states=states)


def _singles(row: Row) -> list[Row]:
    """Split a row with drafts into a row for its last known token and one row for each drafted token.

    Each of the latter carries its token as its own `draft`.
    """
    if row.count == 1 or not row.draft:
        return [row]
    known = Row(row.request, row.start, 1, row.pages, True)
    return [known, *(Row(row.request, row.start + place, 1, row.pages, True, [guess]) for place, guess in enumerate(row.draft, 1))]


def _page_table(
    rows: Sequence[Row], tables: "list[array[int]]", needed: np.ndarray, ends: np.ndarray, page_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ([R + 1], [pages]) int32: the page tables end to end, each cut to the pages that its tokens need."""
    lengths = np.array([len(table) for table in tables])
    for place in np.flatnonzero(lengths != needed).tolist():  # chunks: their leases hold the whole prompt
        if lengths[place] < needed[place]:
            raise ValueError(
                f"request {rows[place].request.id}: {lengths[place]} pages of {page_size} tokens for {int(ends[place])} tokens"
            )
        tables[place] = tables[place][: int(needed[place])]
    return _offsets(needed).astype(np.int32), np.frombuffer(bytearray().join(tables), np.int32)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Return [n + 1] from [n]: where each part begins, and the end."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
