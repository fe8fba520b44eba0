"""A step plan as packed tensors."""

from array import array

import numpy as np
import torch

from fairlead_worker.engine.plan import StepPlan
from fairlead_worker.kernels.base import PackedStep


def pack(plan: StepPlan, page_size: int, device: torch.device) -> PackedStep:
    """Lay the rows of `plan` end to end. ValueError on a row whose page table is too short for its tokens.

    A row that speculates becomes as many rows of one token: a backend stores a step's KV before it attends, so each of them sees the
    ones before it, and has the bits that it would have as a plain decode. That makes the verified tokens the same ones in bfloat16 too.
    """
    tokens = array("I")
    slots: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    tables: list[torch.Tensor] = []
    sampling: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    for row in plan.rows:
        needed = -(-row.end // page_size)
        if len(row.pages) < needed:
            raise ValueError(f"request {row.request.id}: {len(row.pages)} pages of {page_size} tokens for {row.end} tokens")
        table = np.fromiter(row.pages, np.int64, needed)
        position = np.arange(row.start, row.end)
        slots.append(table[position // page_size] * page_size + position % page_size)
        positions.append(position)
        tokens.extend(row.request.tokens[row.start : row.end])
        if row.draft:
            tokens.extend(row.draft)
            starts += position.tolist()
            counts += [1] * row.count
            tables += [torch.from_numpy(table[: at // page_size + 1]) for at in range(row.start, row.end)]
            sampling += range(len(tokens) - row.count, len(tokens))
            continue
        starts.append(row.start)
        counts.append(row.count)
        tables.append(torch.from_numpy(table))
        if row.samples:
            sampling.append(len(tokens) - 1)
    return PackedStep(
        tokens=torch.from_numpy(np.frombuffer(tokens, np.uint32).astype(np.int64)).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        starts=starts,
        counts=counts,
        pages=tables,
        sampling=torch.tensor(sampling, dtype=torch.int64, device=device),
    )
