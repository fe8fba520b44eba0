"""Pooling: sum the hidden states of prompts chunk by chunk; the sum of a whole prompt becomes its embedding."""

from itertools import accumulate

import numpy as np
import torch
from torch.nn.functional import normalize

from fairlead_worker.scheduler.plan import StepPlan


def places_to_pool(plan: StepPlan) -> torch.Tensor:
    """Return token indices in the packed step, [n] int64, of all rows in order."""
    places: list[int] = []
    for row, begin in zip(plan.rows, accumulate((row.count for row in plan.rows), initial=0), strict=False):
        places += [begin + position - row.start for position in row.request.to_pool(row.start, row.end)]
    return torch.tensor(places, dtype=torch.int64)


def pool(plan: StepPlan, states: torch.Tensor) -> dict[str, bytes]:
    """Return the new pool content [hidden] float32 by request id, from states [n, hidden] of `places_to_pool`.

    The sum is float32 in any dtype of the model: a sum over thousands of tokens would lose digits in bfloat16. It is normalised to unit
    length at the prompt's end, so a mean needs no division.
    """
    rows = [(row, wanted) for row in plan.rows if (wanted := row.request.to_pool(row.start, row.end))]
    pooled: dict[str, bytes] = {}
    if not rows:
        return pooled
    parts = torch.split(states, [len(wanted) for _, wanted in rows])
    totals = torch.stack([part.float().sum(0) for part in parts]).cpu()  # one copy for all rows: each copy waits for the device
    for (row, _), total in zip(rows, totals, strict=True):
        assert row.request.pool is not None, "it has positions to pool"
        if row.request.pool.sum:
            total += torch.from_numpy(np.frombuffer(row.request.pool.sum, np.float32).copy())
        if row.end == row.request.prompt_length:
            total = normalize(total, dim=0)
        pooled[row.request.id] = total.numpy().tobytes()
    return pooled
