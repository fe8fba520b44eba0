"""The overlapped loop: launches a step before it reads the step before it, so that the device does not wait for the host.

One round has three parts. Plan and launch the forward pass of step N + 1. Read the tokens of step N, which that pass already has on the
device. Sample the tokens of N + 1, with everything that depends on the tokens of N (grammars, penalties, stops). The output is the same as
that of `run_plain`. Steps that cannot overlap (prompt logprobs, pooling, drafts) and plans that need preemption wait for that step.
"""

from collections.abc import Callable
from typing import Protocol

from fairlead_worker.engine.grammar_queue import GrammarCompiler
from fairlead_worker.engine.loop import Adapters, EngineEnd, MessageHandler
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.ipc.messages import Output
from fairlead_worker.scheduler.overlap_scheduler import OverlapScheduler
from fairlead_worker.scheduler.plan import Row, Runner, StepPlan, StepResult
from fairlead_worker.scheduler.scheduler import Scheduler
from fairlead_worker.scheduler.step_outputs import StepOutputs


class Launched(Protocol):
    """A launched step."""

    def choose(self, rows: list[Row]) -> None:
        """Sample a token for each of these rows of the plan. Their requests have all tokens before it."""
        ...

    def read(self) -> StepResult:
        """Wait for the tokens and return them."""
        ...


class AheadRunner(Runner, Protocol):
    """A runner that can launch a step without waiting for its result."""

    def can_launch(self, plan: StepPlan) -> bool: ...

    def launch(self, plan: StepPlan) -> Launched:
        """Start the forward pass. Unread tokens of the step before it are filled in on the device."""
        ...


def run_overlapped(
    scheduler: Scheduler,
    runner: AheadRunner,
    end: EngineEnd,
    timer: RequestTimer | None = None,
    adapters: Adapters | None = None,
    compiler: GrammarCompiler | None = None,
) -> int:
    """Run the overlapped loop; as `run_plain`. A schedule trace lacks launched steps: tracing is for the plain loop."""
    timer = timer or RequestTimer()
    pending: list[Output] = []
    """Outputs to send with the next report."""

    def report(plan: StepPlan, result: StepResult, outputs: StepOutputs) -> None:
        outputs.full[:0] = pending
        pending.clear()
        end.send(timer.report(plan, result, outputs, scheduler.cache.drain_events(), handler.load()))

    overlap = Overlap(OverlapScheduler(scheduler), runner, timer, report)
    handler = MessageHandler(scheduler, end, timer, adapters, compiler, overlap.reconcile)
    while True:
        try:
            outputs = handler.serve(handler.receive(overlap.is_busy))
            if outputs is None:
                overlap.reconcile()
                return 0
            pending += outputs
            reported = overlap.step()
        except Exception as error:
            return handler.report_failure(error)
        if pending or not reported:
            report(StepPlan(), StepResult([]), StepOutputs())


class Overlap:
    """Runs steps with at most one in flight."""

    def __init__(
        self,
        scheduler: OverlapScheduler,
        runner: AheadRunner,
        timer: RequestTimer,
        report: Callable[[StepPlan, StepResult, StepOutputs], None],
    ) -> None:
        self.is_busy = False
        """Whether the latest round had work, so that more may follow."""
        self._scheduler, self._runner, self._timer, self._report = scheduler, runner, timer, report
        self._in_flight: tuple[StepPlan, Launched] | None = None

    def step(self) -> bool:
        """Launch a step, if there is work, and read the step before it. Return whether a step was reported."""
        scheduler, runner, reported = self._scheduler, self._runner, False
        if not scheduler.can_plan_ahead:
            reported = self.reconcile()
        plan = scheduler.plan()
        self.is_busy = bool(plan) or reported or self._in_flight is not None
        if not plan:
            return self.reconcile() or reported
        self._timer.record_plan(plan)
        if not runner.can_launch(plan):
            self.reconcile()
            plan = scheduler.correct(plan)
            result = runner.execute(plan)
            self._timer.record_step(plan, result)
            self._report(plan, result, scheduler.advance(plan, result))
            return True
        launched = runner.launch(plan)
        reported = self.reconcile() or reported
        awaited = scheduler.rows_to_sample(plan)
        launched.choose(awaited)
        scheduler.advance_unread(plan, awaited)
        self._in_flight = plan, launched
        return reported

    def reconcile(self) -> bool:
        """Read and report the step in flight. Return False if there is none."""
        if self._in_flight is None:
            return False
        (plan, launched), self._in_flight = self._in_flight, None
        result = StepResult([])

        def read() -> StepResult:
            nonlocal result
            result = launched.read()
            return result

        outputs = self._scheduler.reconcile(plan, read)
        self._report(plan, result, outputs)
        return True
