"""Static batching on the engine's runner: the policy that continuous batching replaced. It exists for comparison only.

A batch is admitted, padded and run until its last request is done. Requests that arrive meanwhile wait.
"""

import time
from array import array
from collections.abc import Sequence

from bench.common.serving import PAGE_SIZE, Arrival, Served
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.request import Request


def serve_statically(runner: ModelRunner, workload: Sequence[Arrival], size: int) -> Served:
    """Run batches of at most `size` waiting requests, oldest first. Tokens are sent as they come, in favour of this policy.

    Prompts are padded on the left to the longest of the batch, and every row is computed until the longest output is out. Those positions
    are run through the model as real ones are, which is what padding costs. Masking them changes tokens, not times, and is left out.
    """
    tokens: list[list[float]] = [[] for _ in workload]
    queue = sorted(range(len(workload)), key=lambda i: workload[i].at)
    steps = computed = wasted = 0
    began = time.perf_counter()
    while queue:
        time.sleep(max(workload[queue[0]].at - (time.perf_counter() - began), 0.0))
        now = time.perf_counter() - began
        batch = [i for i in queue if workload[i].at <= now][:size]
        queue = [i for i in queue if i not in batch]
        longest, last = max(len(workload[i].prompt) for i in batch), max(workload[i].output for i in batch)
        rows = _rows(workload, batch, longest, last)
        for step in range(last):
            plan = StepPlan(rows, samples=len(rows))
            result = runner.execute(plan)
            now = time.perf_counter() - began
            for index, row, (token,) in zip(batch, rows, result.tokens, strict=True):
                wanted = workload[index]
                computed += row.count
                wasted += row.count - (len(wanted.prompt) if step == 0 else step < wanted.output)
                if step < wanted.output:
                    tokens[index].append(now)
                row.request.tokens.append(token)
                row.start, row.count = row.end, 1
            steps += 1
    return Served([each.at for each in workload], tokens, steps, computed, wasted)


def pages_for(workload: Sequence[Arrival], size: int) -> int:
    """Return the pages that the largest batch reserves: every row is as long as the longest prompt and output."""
    return size * -(-(max(len(w.prompt) for w in workload) + max(w.output for w in workload)) // PAGE_SIZE)


def _rows(workload: Sequence[Arrival], batch: list[int], longest: int, output: int) -> list[Row]:
    pages = -(-(longest + output) // PAGE_SIZE)
    rows = []
    for place, index in enumerate(batch):
        prompt = workload[index].prompt
        known = array("I", [0] * (longest - len(prompt)) + list(prompt))
        request = Request(str(index), known, longest, Sampling(max_tokens=output, temperature=0.0), root=0, arrival=place)
        rows.append(Row(request, 0, longest, array("i", range(place * pages, (place + 1) * pages)), samples=True))
    return rows
