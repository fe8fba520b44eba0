"""A planner for unit tests: every unfinished request in every step, prompts in chunks, pages scattered at random."""

import random
from array import array
from collections.abc import Sequence

from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.scheduler.plan import Row, Runner, StepPlan
from fairlead_worker.scheduler.request import Request


def make_request(name: str, tokens: Sequence[int], sampling: Sampling, arrival: int = 0) -> Request:
    return Request(Submit(name, b"", sampling, root=0), array("I", tokens), len(tokens), arrival)


class Planner:
    """Gives each request all its pages immediately and computes `chunk` prompt tokens of each in a step."""

    def __init__(self, requests: list[Request], pages: int, page_size: int, chunk: int = 1 << 30) -> None:
        self.requests, self.page_size, self.chunk = requests, page_size, chunk
        free = random.Random(3).sample(range(pages), pages)
        self.tables = {r.id: self.table(free, len(r.tokens) + r.sampling.max_tokens) for r in requests}

    def table(self, free: list[int], tokens: int) -> "array[int]":
        return array("i", [free.pop() for _ in range(-(-tokens // self.page_size))])

    def plan(self) -> StepPlan:
        return StepPlan([self.row(r) for r in self.requests if r.output_length < r.sampling.max_tokens])

    def row(self, request: Request) -> Row:
        count = min(request.uncomputed, self.chunk)
        return Row(request, request.computed, count, self.tables[request.id], samples=count == request.uncomputed)

    def run(self, runner: Runner) -> None:
        """Run every request to its end; their tokens are in `request.tokens`."""
        while plan := self.plan():
            result = runner.execute(plan)
            sampled = iter(result.tokens)
            for row in plan.rows:
                row.request.computed = row.end
                if row.samples:
                    row.request.tokens.extend(next(sampled))
