"""The engine's loop in this process: requests in, tokens and the times at which they were read out, plain or with steps launched ahead."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.gpu.model import submit
from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.overlap import Overlap
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.execution.overlap import OverlappedRunner
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.overlap_scheduler import OverlapScheduler
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.scheduler import Scheduler
from fairlead_worker.scheduler.step_outputs import StepOutputs


class Loop:
    """A scheduler and a runner, with an empty cache."""

    def __init__(self, runner: ModelRunner, overlap: bool, **settings: Any) -> None:
        """`settings`: of `SchedulerConfig`."""
        config = SchedulerConfig(runner.loaded.max_model_len, eos_token_ids=(), **settings)
        size = runner.backend.spec.page_size
        self.scheduler = Scheduler(config, PrefixCache(PagePool(runner.backend.pages, size), 4 * size, extend))
        self.tokens: dict[int, list[int]] = {}
        self.times: dict[int, list[float]] = {}
        """When each token was read, by `time.perf_counter`."""
        self.live: set[int] = set()
        self._ahead = OverlappedRunner(runner)
        self._overlap = Overlap(OverlapScheduler(self.scheduler), self._ahead, RequestTimer(), self._tell) if overlap else None

    def submit(self, number: int, prompt: Sequence[int], new: int, adapter: int = 0, **sampling: Any) -> None:
        """One request; greedy unless `sampling` says otherwise. AssertionError where it is refused."""
        self.tokens[number], self.times[number] = [], []
        self.live.add(number)
        wishes = Sampling(**{"max_tokens": new, "temperature": 0, "ignore_eos": True, **sampling})
        submit(self.scheduler, number, prompt, wishes, adapter)

    def pretend(self) -> None:
        """The prompts as if they were computed, each with a first token: their KV is what their pages hold. No step is out."""
        while self.scheduler.waiting or not all(self.tokens.values()):
            plan = self.scheduler.plan()
            result = StepResult([[7] for row in plan.rows if row.samples])  # no seconds: nothing is learnt from it
            self._tell(plan, result, self.scheduler.advance(plan, result))

    def step(self) -> None:
        """One more step."""
        if self._overlap is not None:
            self._overlap.step()
            return
        plan = self.scheduler.plan()
        result = self._ahead.execute(plan)
        self._tell(plan, result, self.scheduler.advance(plan, result))

    def run(self, while_: Callable[[], bool] | None = None) -> None:
        """Steps while `while_` says so, else to the end; then none is out."""
        while not self.scheduler.idle and (while_ is None or while_()):
            self.step()
        self.settle()

    def settle(self) -> None:
        """Reads the step that is out."""
        if self._overlap is not None:
            self._overlap.reconcile()

    def _tell(self, plan: StepPlan, result: StepResult, outputs: StepOutputs) -> None:
        now = time.perf_counter()
        for output in outputs:
            number, tokens = int(output.id), memoryview(output.tokens).cast("I").tolist()
            self.tokens[number] += tokens
            self.times[number] += [now] * len(tokens)
            if output.finish is not None:
                self.live.discard(number)
