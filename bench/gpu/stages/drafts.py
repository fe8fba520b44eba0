"""Stage: a chain of drafted tokens on the device, beside the same chain whose tokens the host reads one by one.

The roofline is of the chain on the device; the other way is only compared with it.
"""

from array import array
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.device import Device
from bench.gpu.report import beside
from bench.gpu.roofline import beside_roofline, decode_work, rates_of
from bench.gpu.shared_model import PAGE, Kit
from fairlead_worker.execution.draft import Drafter
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.scheduler.plan import Row, StepPlan
from fairlead_worker.scheduler.request import Request

LENGTH = 5
"""Draft tokens of each row, the default of `num_speculative_tokens`."""


class ReadByHost(Drafter):
    """Reads each drafted token before the next pass."""

    def _choose(self, rows: list[Row], drafted: torch.Tensor | None = None) -> torch.Tensor:
        tokens = super()._choose(rows, drafted)
        return torch.tensor(tokens.tolist(), dtype=torch.int64).to(tokens.device)


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """For some batches: whether both draft the same tokens, and milliseconds of a chain. The model is its own draft model."""
    batches, context = ((1, 8, 32), 1024) if device.cuda else ((1, 3), 40)
    pages = batches[-1] * -(-(context + LENGTH) // PAGE)
    runner, rates, shape = kit.shared(pages, batches[-1]), rates_of(device), "tiny" if device.tiny else "8b"
    for rows in batches:
        plan = draft_plan(rows, context, min(512, runner.loaded.vocabulary_size))
        times, drafts = [], []
        for kind in (Drafter, ReadByHost):
            drafter = kind(runner.forward, runner.loaded, runner.backend, runner.loaded.vocabulary_size)
            drafter.graphs = runner.graphs
            drafts.append([row.draft for row in read(drafter, plan).rows])
            times.append(device.seconds(lambda drafter=drafter, plan=plan: read(drafter, plan)) * 1e3)  # type: ignore[misc]  # defaults
        what = f"{LENGTH} draft tokens for {rows} rows at a context of {context}"
        row = {"what": what, "ok": drafts[0] == drafts[1], "ms": times[0], "ms_read_by_host": times[1], "graphs": runner.graphs is not None}
        moved, flops = decode_work(shape, rows, context + LENGTH / 2)
        yield beside(beside_roofline(row, rates, (LENGTH * moved, LENGTH * flops), times[0] / 1e3), "of_roofline", least=0.75)


def read(drafter: Drafter, plan: StepPlan) -> StepPlan:
    """Draft, and wait for the tokens."""
    drafts = drafter.draft(plan)
    assert drafts is not None
    return drafts.read()


def draft_plan(rows: int, context: int, vocabulary: int) -> StepPlan:
    """Return decodes of `context` tokens, each on its own pages, that want LENGTH draft tokens."""
    each = -(-(context + LENGTH) // PAGE)
    made = []
    for number in range(rows):
        tokens = array("I", [(number * 31 + place * 7) % vocabulary for place in range(context)])
        request = Request(Submit(str(number), b"", Sampling(max_tokens=100, temperature=0.0), 0), tokens, context - 1, number)
        pages = array("i", range(number * each, (number + 1) * each))
        made.append(Row(request, context - 1, 1 + LENGTH, pages, True))
    return StepPlan(made, decodes=rows, samples=rows, drafted=rows * LENGTH)
