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
    watch: RequestTimer | None = None,
    adapters: Adapters | None = None,
    compiler: GrammarCompiler | None = None,
) -> int:
    """As `run_plain`. A trace of the schedule has the steps alone that were not launched ahead: it is for the plain loop."""
    watch = watch or RequestTimer()
    pending: list[Output] = []
    """To be told with the next report."""

    def tell(plan: StepPlan, result: StepResult, outputs: StepOutputs) -> None:
        outputs.told[:0] = pending
        pending.clear()
        outbox.send(watch.report(plan, result, outputs, scheduler.drain_events(), handler.load()))

    overlap = Overlap(scheduler, runner, watch, tell)
    handler = MessageHandler(scheduler, inbox, outbox, watch, adapters, compiler, overlap.settle)
    while True:
        messages = handler.receive(overlap.busy)
        try:
            outputs = handler.serve(messages)
            if outputs is None:
                overlap.settle()
                return 0
            pending += outputs
            told = overlap.step(*handler.admission)
        except Exception as error:
            return handler.failed(error)
        if pending or not told:
            tell(StepPlan(), StepResult([]), StepOutputs())


class Overlap:
    """Steps, one of them ahead."""

    def __init__(
        self,
        scheduler: OverlapScheduler,
        runner: AheadRunner,
        watch: RequestTimer,
        tell: Callable[[StepPlan, StepResult, StepOutputs], None],
    ) -> None:
        self.busy = False
        """There was something to do in the latest step, so there may be more."""
        self._scheduler, self._runner, self._watch, self._tell = scheduler, runner, watch, tell
        self._ahead: tuple[StepPlan, Launched] | None = None

    def step(self, admits: bool = True, begins: int = 0) -> bool:
        """Launches a step, if there is one, and reads the one before it. Whether any was told of. Otherwise as `Scheduler.plan`."""
        scheduler, runner, told = self._scheduler, self._runner, False
        if not scheduler.can_plan_ahead:
            told = self.settle()
        plan = scheduler.plan(admits, begins)
        self.busy = bool(plan) or told or self._ahead is not None
        if not plan:
            return self.settle() or told
        self._watch.planned(plan)
        if not runner.can_launch(plan):
            self.settle()
            scheduler.withdraw(plan)
            result = runner.execute(plan)
            self._watch.executed(plan, result)
            self._tell(plan, result, scheduler.advance(plan, result))
            return True
        launched = runner.launch(plan)
        told = self.settle() or told
        awaited = scheduler.awaited(plan)
        launched.choose(awaited)
        scheduler.assume(plan, awaited)
        self._ahead = plan, launched
        return told

    def settle(self) -> bool:
        """Reads the step that is out. False where none is."""
        if self._ahead is None:
            return False
        (plan, launched), self._ahead = self._ahead, None
        result = StepResult([])

        def read() -> StepResult:
            nonlocal result
            result = launched.read()
            return result

        outputs = self._scheduler.settle(plan, read)
        self._tell(plan, result, outputs)
        return True
