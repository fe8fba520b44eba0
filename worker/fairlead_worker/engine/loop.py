"""The engine's loop: messages in, steps, messages out. The transport and the model are whoever fits the protocols."""

import logging
from collections.abc import Callable
from typing import Protocol

from fairlead_worker.cache.hot import find_hot_prefixes
from fairlead_worker.engine.grammar_queue import POLL_SECONDS, GrammarCompiler, GrammarQueue
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.messages import (
    Abort,
    AdapterChanged,
    Failed,
    FetchAdapter,
    FromEngine,
    GetHotPrefixes,
    Hot,
    Load,
    LoadAdapter,
    Output,
    Stop,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from fairlead_worker.scheduler.plan import Runner, StepResult
from fairlead_worker.scheduler.prefill_delayer import PrefillDelayer
from fairlead_worker.scheduler.scheduler import Scheduler
from fairlead_worker.scheduler.step_outputs import StepOutputs
from fairlead_worker.scheduler.validation import refusal

HEARTBEAT_SECONDS = 1.0
"""Longest silence of an idle engine."""

logger = logging.getLogger(__name__)


class Inbox(Protocol):
    """Where messages for the engine come in."""

    def receive(self, timeout: float) -> list[ToEngine]:
        """All messages that are there, in order; waits up to `timeout` seconds for the first one, and not at all for 0."""
        ...


class Outbox(Protocol):
    """Where the engine's messages go."""

    def send(self, message: FromEngine) -> None:
        """Hands the message over; never waits for whoever reads."""
        ...


class Adapters(Protocol):
    """The LoRA adapters of the model."""

    def __contains__(self, number: int) -> bool: ...

    def change(self, message: FetchAdapter | LoadAdapter | UnloadAdapter) -> AdapterChanged | None:
        """None: the answer comes later, by itself. What cannot be loaded is told, and everything else goes on."""
        ...


def run_plain(
    scheduler: Scheduler,
    runner: Runner,
    inbox: Inbox,
    outbox: Outbox,
    timer: RequestTimer | None = None,
    adapters: Adapters | None = None,
    compiler: GrammarCompiler | None = None,
) -> int:
    """Plans, executes and reports step after step until `Stop` (returns 0) or until a step fails (sends `Failed`, returns 1).

    Every step is reported, and every second of idleness: a silent engine is a dead one.
    """
    is_busy = False
    timer = timer or RequestTimer()
    handler = MessageHandler(scheduler, inbox, outbox, timer, adapters, compiler)
    while True:
        messages = handler.receive(is_busy)
        try:
            outputs_before = handler.serve(messages)
            if outputs_before is None:
                return 0
            plan, result, outputs = scheduler.plan(*handler.admission), StepResult([]), StepOutputs()
            is_busy = bool(plan)
            if is_busy:
                timer.record_plan(plan)
                result = runner.execute(plan)
            timer.record_step(plan, result)
            if is_busy:
                outputs = scheduler.advance(plan, result)
        except Exception as error:
            return handler.report_failure(error)
        outputs.full[:0] = outputs_before
        outbox.send(timer.report(plan, result, outputs, scheduler.drain_events(), handler.load()))


class MessageHandler:
    """What comes in between steps, for either loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Inbox,
        outbox: Outbox,
        timer: RequestTimer,
        adapters: Adapters | None = None,
        compiler: GrammarCompiler | None = None,
        reconcile: Callable[[], object] = lambda: None,
    ) -> None:
        """`reconcile`: waits for the step that is out, if one is. No adapter is changed beside a step."""
        self._scheduler, self._inbox, self._outbox, self._timer, self._adapters = scheduler, inbox, outbox, timer, adapters
        self._reconcile = reconcile
        self._grammar_queue = GrammarQueue(_submit_safely(scheduler), compiler)
        self._prefill_delayer = PrefillDelayer(scheduler)
        self._wait = 0.0
        """Seconds for which those that wait do so for others."""

    @property
    def admission(self) -> tuple[bool, int]:
        """Whether the next step may admit those that wait, and what one of them may begin with: as of `Scheduler.plan`."""
        return self._wait == 0.0, self._prefill_delayer.early_start_tokens

    def load(self) -> Load:
        """The scheduler's, and those that wait for their grammars."""
        return self._grammar_queue.add_to_load(self._scheduler.load())

    def receive(self, is_busy: bool) -> list[ToEngine]:
        """The messages that are there; an engine with nothing to do waits for one: a heartbeat at most, and as long as a request may."""
        most = POLL_SECONDS if self._grammar_queue else HEARTBEAT_SECONDS
        return self._inbox.receive(0.0 if is_busy else min(self._wait or most, most))

    def serve(self, messages: list[ToEngine]) -> list[Output] | None:
        """Does what they ask for: what is to be told at once, or None after `Stop`."""
        outputs = self._serve(messages)
        self._wait = self._prefill_delayer.seconds()
        return outputs

    def _serve(self, messages: list[ToEngine]) -> list[Output] | None:
        scheduler, outputs = self._scheduler, list[Output]()
        for message in messages:
            if isinstance(message, Stop):
                return None
            if isinstance(message, FetchAdapter | LoadAdapter | UnloadAdapter):
                self._reconcile()
                if (changed := _change(self._adapters, message)) is not None:
                    self._outbox.send(changed)
                continue
            if isinstance(message, GetHotPrefixes):
                self._outbox.send(Hot(find_hot_prefixes(scheduler.cache, message.tokens)))
                continue
            self._timer.record_arrival(message)
            answer = receive(scheduler, self._grammar_queue, message, self._adapters)
            if answer is not None:
                outputs.append(answer)
        if self._grammar_queue:
            outputs += self._grammar_queue.submit_ready()
        return outputs

    def report_failure(self, error: Exception) -> int:
        """Says that a step failed, or what was to be done before it, and why: the exit status."""
        logger.error("failed at step %d", self._scheduler.stats.steps, exc_info=error)
        self._outbox.send(Failed(reason=f"failed at step {self._scheduler.stats.steps}: {type(error).__name__}: {error}"))
        return 1


def receive(scheduler: Scheduler, grammar_queue: GrammarQueue, message: Submit | Abort, adapters: Adapters | None = None) -> Output | None:
    """Give one message to the scheduler, or to the grammar queue before it. An error ends that request alone."""
    if isinstance(message, Abort):
        return grammar_queue.abort(message.id) or scheduler.abort(message.id)
    if message.adapter and (adapters is None or message.adapter not in adapters):
        return refusal(message.id, "its LoRA adapter is not loaded (any more)")
    try:
        return grammar_queue.submit(message)
    except Exception as error:
        return _refuse_after_error(message, error)


def _submit_safely(scheduler: Scheduler) -> Callable[[Submit], Output | None]:
    """The scheduler's `submit`, for the grammar_queue: whose grammar gets ready later has nobody else to catch what goes wrong."""

    def submit(message: Submit) -> Output | None:
        try:
            return scheduler.submit(message)
        except Exception as error:
            return _refuse_after_error(message, error)

    return submit


def _refuse_after_error(message: Submit, error: Exception) -> Output:
    logger.error("request %s could not be taken", message.id, exc_info=error)
    return refusal(message.id, f"the engine could not take this request: {type(error).__name__}: {error}")


def _change(adapters: Adapters | None, message: FetchAdapter | LoadAdapter | UnloadAdapter) -> AdapterChanged | None:
    if adapters is None:
        return AdapterChanged(message.number, error="no LoRA adapters are served here: start the worker with --max-loras above 0")
    return adapters.change(message)
