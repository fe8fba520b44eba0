"""Hidden states of prompts, summed over what a step has computed of each."""

from itertools import accumulate

import numpy as np
import torch

from fairlead_worker.engine.plan import StepPlan


def places_to_pool(plan: StepPlan) -> torch.Tensor:
    """Places in the packed step, [n] int64, of all rows in turn."""
    places: list[int] = []
    for row, begin in zip(plan.rows, accumulate((row.count for row in plan.rows), initial=0), strict=False):
        places += [begin + position - row.start for position in row.request.to_pool(row.start, row.end)]
    return torch.tensor(places, dtype=torch.int64)


def pool(plan: StepPlan, states: torch.Tensor) -> dict[str, np.ndarray]:
    """states [n, hidden], of `places_to_pool` -> by request id their sum, [hidden] float32."""
    counts = {row.request.id: len(wanted) for row in plan.rows if (wanted := row.request.to_pool(row.start, row.end))}
    parts = states.float().split(list(counts.values()))
    # In float32 whatever the model's dtype: a mean over thousands of tokens would lose digits in bfloat16.
    return {name: part.sum(0).cpu().numpy() for name, part in zip(counts, parts, strict=True)}
