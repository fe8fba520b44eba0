"""Drafted tokens as queries of one row, so that a GPU reads the KV of their request once.

A step packs a decode with k drafted tokens as 1 + k rows of one token (`execution.pack`), each of which reads all of the request's KV. Here
they become one row of 1 + k queries with a causal mask, for the prefill kernel on tensor cores, whose tiles hold 16 or more queries times
query heads. Pure: CPU arrays in, CPU arrays out.
"""

from dataclasses import replace

import numpy as np
import torch

from fairlead_worker.kernels.base import PackedStep


def join_rows(step: PackedStep) -> PackedStep | None:
    """Return `step` with the rows of one token joined that belong to one request; None if there are none, or beside chunks.

    Two rows belong to one request if the second continues the first on the page that the first writes: no two requests write to one page.
    """
    counts = np.array(step.counts, np.int64)
    if len(counts) < 2 or (counts > 1).any():
        return None
    starts, indptr, indices = np.array(step.starts, np.int64), step.page_indptr.numpy(), step.page_indices.numpy()
    begins, lengths = indptr[:-1], np.diff(indptr)
    written = indices[indptr[1:-1] - 1]
    there = begins[1:] + lengths[:-1] - 1  # the same place in the next row's table, which may be too short for it
    continues = (starts[1:] == starts[:-1] + 1) & (indices[np.minimum(there, len(indices) - 1)] == written)
    if not continues.any():
        return None
    first = np.flatnonzero(np.concatenate(([True], ~continues)))
    last = np.concatenate((first[1:], [len(counts)])) - 1
    kept = np.zeros(len(counts), bool)
    kept[last] = True
    pages = np.repeat(kept, lengths)
    return replace(
        step,
        starts=starts[first].tolist(),
        counts=(last - first + 1).tolist(),
        page_indptr=torch.from_numpy(np.concatenate(([0], np.cumsum(lengths[last]))).astype(np.int32)),
        page_indices=torch.from_numpy(indices[pages]),
        others=[replace(group, page_indices=torch.from_numpy(group.page_indices.numpy()[pages])) for group in step.others],
    )
