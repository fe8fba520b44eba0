"""The engine's loop: receives messages, runs steps, sends messages. Transport and model are protocols."""

import logging
from collections.abc import Callable
from typing import Protocol

from fairlead_worker.cache.hot import find_hot_prefixes
from fairlead_worker.engine.grammar_queue import POLL_SECONDS, GrammarCompiler, GrammarQueue
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.ipc.messages import (
    Abort,
    AdapterChanged,
    Failed,
    FetchAdapter,
    FromEngine,
    GetHotPrefixes,
    HotPrefixes,
    Load,
    LoadAdapter,
    Output,
    PrefixCacheReset,
    ResetPrefixCache,
    Stop,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from fairlead_worker.scheduler.plan import Runner, StepResult
from fairlead_worker.scheduler.scheduler import Scheduler
from fairlead_worker.scheduler.step_outputs import StepOutputs
from fairlead_worker.scheduler.validation import refusal

HEARTBEAT_SECONDS = 1.0
"""Longest interval between reports of an idle engine."""

logger = logging.getLogger(__name__)


class Inbox(Protocol):
    """Receives messages for the engine."""

    def receive(self, timeout: float) -> list[ToEngine]:
        """Return all available messages in order. Wait up to `timeout` seconds for the first one; 0: do not wait."""
        ...


class Outbox(Protocol):
    """Sends the engine's messages."""

    def send(self, message: FromEngine) -> None:
        """Queue the message; never wait for the reader."""
        ...


class Adapters(Protocol):
    """The LoRA adapters of the model."""

    def __contains__(self, number: int) -> bool: ...

    def change(self, message: FetchAdapter | LoadAdapter | UnloadAdapter) -> AdapterChanged | None:
        """Apply the change and return its result, or None if the result is sent later. A failed load affects nothing else."""
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
    """Plan, execute and report steps until `Stop` (return 0) or until a step fails (send `Failed`, return 1).

    Each step is reported, and an idle engine reports once per second: a silent engine counts as dead.
    """
    is_busy = False
    timer = timer or RequestTimer()
    handler = MessageHandler(scheduler, inbox, outbox, timer, adapters, compiler)
    while True:
        try:
            outputs_before = handler.serve(handler.receive(is_busy))
            if outputs_before is None:
                return 0
            plan, result, outputs = scheduler.plan(), StepResult([]), StepOutputs()
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
    """Handles messages between steps, for both loops."""

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
        """`reconcile`: waits for the step in flight, if any. Adapters change only between steps."""
        self._scheduler, self._inbox, self._outbox, self._timer, self._adapters = scheduler, inbox, outbox, timer, adapters
        self._reconcile = reconcile
        self._grammar_queue = GrammarQueue(_submit_safely(scheduler), compiler)

    def load(self) -> Load:
        """Return the scheduler's load plus the requests that wait for their grammars."""
        return self._grammar_queue.add_to_load(self._scheduler.load())

    def receive(self, is_busy: bool) -> list[ToEngine]:
        """Return the available messages. An idle engine waits for one, at most a heartbeat."""
        most = POLL_SECONDS if self._grammar_queue else HEARTBEAT_SECONDS
        return self._inbox.receive(0.0 if is_busy else most)

    def serve(self, messages: list[ToEngine]) -> list[Output] | None:
        """Apply the messages. Return the outputs to send now, or None after `Stop`."""
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
                self._outbox.send(HotPrefixes(find_hot_prefixes(scheduler.cache, message.tokens)))
                continue
            if isinstance(message, ResetPrefixCache):
                self._outbox.send(PrefixCacheReset(scheduler.cache.clear()))
                continue
            self._timer.record_arrival(message)
            answer = receive(scheduler, self._grammar_queue, message, self._adapters)
            if answer is not None:
                outputs.append(answer)
        if self._grammar_queue:
            outputs += self._grammar_queue.submit_ready()
        return outputs

    def report_failure(self, error: Exception) -> int:
        """Log and send the reason why a step or a message failed. Return the exit status."""
        logger.error("failed at step %d", self._scheduler.stats.steps, exc_info=error)
        self._outbox.send(Failed(reason=f"failed at step {self._scheduler.stats.steps}: {type(error).__name__}: {error}"))
        return 1


def receive(scheduler: Scheduler, grammar_queue: GrammarQueue, message: Submit | Abort, adapters: Adapters | None = None) -> Output | None:
    """Pass one message to the scheduler, or to the grammar queue if it has a grammar. An error ends only that request."""
    if isinstance(message, Abort):
        return grammar_queue.abort(message.id) or scheduler.abort(message.id)
    if message.adapter and (adapters is None or message.adapter not in adapters):
        return refusal(message.id, "its LoRA adapter is not loaded (any more)")
    try:
        return grammar_queue.submit(message) if message.grammar else scheduler.submit(message)
    except Exception as error:
        return _refuse_after_error(message, error)


def _submit_safely(scheduler: Scheduler) -> Callable[[Submit], Output | None]:
    """Return a `submit` that refuses the request on an error. The grammar queue calls it later, without another error handler."""

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
