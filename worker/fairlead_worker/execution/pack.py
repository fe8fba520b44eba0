"""A step plan as packed tensors: array operations over all rows, and Python only to collect what each row holds.

`python bench/packing.py`: what it costs for 256 decodes.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fairlead_worker.engine.plan import Row, StepPlan
from fairlead_worker.kernels.base import PackedStep


def pack(plan: StepPlan, page_size: int, device: torch.device) -> PackedStep:
    """Lay the rows of `plan` end to end. ValueError on a row whose page table is too short for its tokens."""
    rows = plan.rows
    starts = [row.start for row in rows]
    counts = [row.count for row in rows]
    first, many = np.array(starts, np.int64), np.array(counts, np.int64)
    ends = first + many
    indptr, indices = _page_table(rows, -(-ends // page_size), ends, page_size)
    token_indptr = _offsets(many)
    positions = np.arange(token_indptr[-1]) + np.repeat(first - token_indptr[:-1], many)
    places, offsets = np.divmod(positions, page_size)
    slots = indices[places + np.repeat(indptr[:-1], many)].astype(np.int64) * page_size + offsets
    # The requests' tokens grow, and so cannot be viewed: each row's are copied once.
    tokens = b"".join([row.request.tokens[start:end] for row, start, end in zip(rows, starts, ends.tolist(), strict=True)])
    sampling = token_indptr[1:][np.array([row.samples for row in rows], bool)] - 1
    return PackedStep(
        tokens=torch.from_numpy(np.frombuffer(tokens, np.uint32).astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        starts=starts,
        counts=counts,
        page_indptr=torch.from_numpy(indptr),
        page_indices=torch.from_numpy(indices),
        sampling=torch.from_numpy(sampling).to(device),
    )


def _page_table(rows: Sequence[Row], needed: np.ndarray, ends: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """([R + 1], [pages]) int32: the page tables end to end, each cut to the pages that its tokens need."""
    tables = [row.pages for row in rows]
    lengths = np.array([len(table) for table in tables])
    for place in np.flatnonzero(lengths != needed).tolist():  # chunks: their leases hold the whole prompt
        if lengths[place] < needed[place]:
            raise ValueError(
                f"request {rows[place].request.id}: {lengths[place]} pages of {page_size} tokens for {int(ends[place])} tokens"
            )
        tables[place] = tables[place][: int(needed[place])]
    return _offsets(needed).astype(np.int32), np.frombuffer(bytearray().join(tables), np.int32)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """[n] -> [n + 1]: where each part begins, and the end."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
