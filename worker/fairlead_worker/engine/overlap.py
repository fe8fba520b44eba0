"""The loop that launches a step before it reads the one before it, so that the device does not wait for the host in between.

One round: plan and launch the forward pass of step N + 1; read the tokens of N, which that pass already has on the device; choose the
tokens of N + 1, with everything that depends on those of N now known (grammars, penalties, stops). The same output as `run_plain`. Steps
that cannot be launched ahead (prompts to be scored, pooling, guesses) and plans for which somebody has to lose pages wait for the step
out.
"""

from collections.abc import Callable
from typing import Protocol

from fairlead_worker.engine.grammar_queue import GrammarCompiler
from fairlead_worker.engine.loop import Adapters, Inbox, MessageHandler, Outbox
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.messages import Output
from fairlead_worker.scheduler.overlap_scheduler import OverlapScheduler
from fairlead_worker.scheduler.plan import Row, Runner, StepPlan, StepResult
from fairlead_worker.scheduler.step_outputs import StepOutputs


class Launched(Protocol):
    """A step on the device."""

    def choose(self, rows: list[Row]) -> None:
        """Have a token chosen for each of these, of the plan's rows that sample; their requests have all tokens before it."""
        ...

    def read(self) -> StepResult:
        """Waits for the tokens."""
        ...


class AheadRunner(Runner, Protocol):
    """A runner that need not wait for its steps."""

    def can_launch(self, plan: StepPlan) -> bool: ...

    def launch(self, plan: StepPlan) -> Launched:
        """Begins the forward pass. Tokens of the step launched before, if it was not read yet, are put in on the device."""
        ...


def run_overlapped(
    scheduler: OverlapScheduler,
    runner: AheadRunner,
    inbox: Inbox,
    outbox: Outbox,
    timer: RequestTimer | None = None,
    adapters: Adapters | None = None,
    compiler: GrammarCompiler | None = None,
) -> int:
    """As `run_plain`. A trace of the schedule has the steps alone that were not launched ahead: it is for the plain loop."""
    timer = timer or RequestTimer()
    pending: list[Output] = []
    """To be told with the next report."""

    def report(plan: StepPlan, result: StepResult, outputs: StepOutputs) -> None:
        outputs.full[:0] = pending
        pending.clear()
        outbox.send(timer.report(plan, result, outputs, scheduler.drain_events(), handler.load()))

    overlap = Overlap(scheduler, runner, timer, report)
    handler = MessageHandler(scheduler, inbox, outbox, timer, adapters, compiler, overlap.reconcile)
    while True:
        messages = handler.receive(overlap.is_busy)
        try:
            outputs = handler.serve(messages)
            if outputs is None:
                overlap.reconcile()
                return 0
            pending += outputs
            reported = overlap.step(*handler.admission)
        except Exception as error:
            return handler.report_failure(error)
        if pending or not reported:
            report(StepPlan(), StepResult([]), StepOutputs())


class Overlap:
    """Steps, one of them ahead."""

    def __init__(
        self,
        scheduler: OverlapScheduler,
        runner: AheadRunner,
        timer: RequestTimer,
        report: Callable[[StepPlan, StepResult, StepOutputs], None],
    ) -> None:
        self.is_busy = False
        """There was something to do in the latest step, so there may be more."""
        self._scheduler, self._runner, self._timer, self._report = scheduler, runner, timer, report
        self._in_flight: tuple[StepPlan, Launched] | None = None

    def step(self, admit: bool = True, early_start_tokens: int = 0) -> bool:
        """Launches a step, if there is one, and reads the one before it. Whether any was told of. Otherwise as `Scheduler.plan`."""
        scheduler, runner, reported = self._scheduler, self._runner, False
        if not scheduler.can_plan_ahead:
            reported = self.reconcile()
        plan = scheduler.plan(admit, early_start_tokens)
        self.is_busy = bool(plan) or reported or self._in_flight is not None
        if not plan:
            return self.reconcile() or reported
        self._timer.record_plan(plan)
        if not runner.can_launch(plan):
            self.reconcile()
            scheduler.drop_finished(plan)
            result = runner.execute(plan)
            self._timer.record_step(plan, result)
            self._report(plan, result, scheduler.advance(plan, result))
            return True
        launched = runner.launch(plan)
        reported = self.reconcile() or reported
        awaited = scheduler.rows_to_sample(plan)
        launched.choose(awaited)
        scheduler.advance_placeholder(plan, awaited)
        self._in_flight = plan, launched
        return reported

    def reconcile(self) -> bool:
        """Reads the step that is out. False where none is."""
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
