"""CPU time of packing a step for the model: up to 256 decodes, beside the earlier array-per-row implementation.

The two implementations alternate, so that other work on the machine slows both.
"""

import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.common.report import make_parser, write_report
from fairlead_worker.execution.pack import pack
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.request import Request

CPU = torch.device("cpu")
PAGE = 16


def decodes(rows: int, length: int) -> StepPlan:
    """Return `rows` requests that have computed all but the last of `length` tokens."""
    tables = [array("i", range(i * -(-length // PAGE), (i + 1) * -(-length // PAGE))) for i in range(rows)]
    requests = [Request(str(i), array("I", range(length)), length - 1, Sampling(max_tokens=64), root=0, arrival=i) for i in range(rows)]
    return StepPlan([Row(r, length - 1, 1, t, samples=True) for r, t in zip(requests, tables, strict=True)])


def pack_by_rows(plan: StepPlan, page_size: int, device: torch.device) -> tuple[object, ...]:
    """Pack a step as before: build every row's table, slots and positions one by one."""
    tokens = array("I")
    slots, positions, tables, sampling = [], [], [], []
    for row in plan.rows:
        table = np.fromiter(row.pages, np.int64, -(-row.end // page_size))
        position = np.arange(row.start, row.end)
        slots.append(table[position // page_size] * page_size + position % page_size)
        positions.append(position)
        tables.append(torch.from_numpy(table))
        tokens.extend(row.request.tokens[row.start : row.end])
        if row.samples:
            sampling.append(len(tokens) - 1)
    return (
        torch.from_numpy(np.frombuffer(tokens, np.uint32).astype(np.int64)).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        torch.from_numpy(np.concatenate(slots)).to(device),
        [row.start for row in plan.rows],
        [row.count for row in plan.rows],
        tables,
        torch.tensor(sampling, dtype=torch.int64, device=device),
    )


def measure(ways: dict[str, Callable[..., object]], plan: StepPlan, repeats: int) -> dict[str, float]:
    """Return the median CPU microseconds of each implementation. They run in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.process_time_ns()
            way(plan, PAGE, CPU)
            times[name].append((time.process_time_ns() - began) / 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    print(f"{'rows':>6}{'tokens':>8}{'before':>10}{'now':>10}{'ratio':>8}   (µs)")
    for rows, length in ((1, 1000), (8, 1000), (256, 1000), (256, 8000)):
        took = measure({"before": pack_by_rows, "now": pack}, decodes(rows, length), options.repeats)
        results.append({"rows": rows, "tokens": length} | took)
        print(f"{rows:>6}{length:>8}{took['before']:>10.0f}{took['now']:>10.0f}{took['before'] / took['now']:>8.1f}")
    write_report(__name__, options, results)
