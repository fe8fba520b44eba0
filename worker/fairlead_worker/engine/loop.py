"""The engine's loop: receives messages, runs steps, sends messages. Transport and model are protocols."""

import logging
from collections.abc import Callable
from functools import partial
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


class EngineEnd(Protocol):
    """The engine's end of its messages."""

    def receive(self, timeout: float) -> list[ToEngine]:
        """Return all available messages in order. Wait up to `timeout` seconds for the first one; 0: do not wait."""
        ...

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
    end: EngineEnd,
    timer: RequestTimer | None = None,
    adapters: Adapters | None = None,
    compiler: GrammarCompiler | None = None,
) -> int:
    """Plan, execute and report steps until `Stop` (return 0) or until a step fails (send `Failed`, return 1).

    Each step is reported, and an idle engine reports once per second: a silent engine counts as dead.
    """
    is_busy = False
    timer = timer or RequestTimer()
    handler = MessageHandler(scheduler, end, timer, adapters, compiler)
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
        end.send(timer.report(plan, result, outputs, scheduler.cache.drain_events(), handler.load()))


class MessageHandler:
    """Handles messages between steps, for both loops."""

    def __init__(
        self,
        scheduler: Scheduler,
        end: EngineEnd,
        timer: RequestTimer,
        adapters: Adapters | None = None,
        compiler: GrammarCompiler | None = None,
        reconcile: Callable[[], object] = lambda: None,
    ) -> None:
        """`reconcile`: waits for the step in flight, if any. Adapters change only between steps."""
        self._scheduler, self._end, self._timer, self._adapters = scheduler, end, timer, adapters
        self._reconcile = reconcile
        self._grammar_queue = GrammarQueue(partial(self._guard, scheduler.submit), compiler)

    def load(self) -> Load:
        """Return the scheduler's load plus the requests that wait for their grammars."""
        return self._grammar_queue.add_to_load(self._scheduler.load())

    def receive(self, is_busy: bool) -> list[ToEngine]:
        """Return the available messages. An idle engine waits for one, at most a heartbeat."""
        most = POLL_SECONDS if self._grammar_queue else HEARTBEAT_SECONDS
        return self._end.receive(0.0 if is_busy else most)

    def serve(self, messages: list[ToEngine]) -> list[Output] | None:
        """Apply the messages. Return the outputs to send now, or None after `Stop`."""
        scheduler, outputs = self._scheduler, list[Output]()
        for message in messages:
            answer: Output | None = None
            match message:
                case Submit():
                    self._timer.record_arrival(message)
                    answer = self._submit(message)
                case Abort(id=request_id):
                    answer = self._grammar_queue.abort(request_id) or scheduler.abort(request_id)
                case FetchAdapter() | LoadAdapter() | UnloadAdapter():
                    self._reconcile()
                    if (changed := self._change(message)) is not None:
                        self._end.send(changed)
                case GetHotPrefixes(tokens=tokens):
                    self._end.send(HotPrefixes(find_hot_prefixes(scheduler.cache, tokens)))
                case ResetPrefixCache():
                    self._end.send(PrefixCacheReset(scheduler.cache.clear()))
                case Stop():
                    return None
            if answer is not None:
                outputs.append(answer)
        if self._grammar_queue:
            outputs += self._grammar_queue.submit_ready()
        return outputs

    def report_failure(self, error: Exception) -> int:
        """Log and send the reason why a step or a message failed. Return the exit status."""
        logger.error("failed at step %d", self._scheduler.stats.steps, exc_info=error)
        self._end.send(Failed(reason=f"failed at step {self._scheduler.stats.steps}: {type(error).__name__}: {error}"))
        return 1

    def _submit(self, message: Submit) -> Output | None:
        """Pass a request to the scheduler, or to the grammar queue if it has a grammar. Return a refusal, if any."""
        if message.adapter and (self._adapters is None or message.adapter not in self._adapters):
            return refusal(message.id, "its LoRA adapter is not loaded (any more)")
        return self._guard(self._grammar_queue.submit if message.grammar else self._scheduler.submit, message)

    def _guard(self, submit: Callable[[Submit], Output | None], message: Submit) -> Output | None:
        """Call `submit`. An error ends only this request."""
        try:
            return submit(message)
        except Exception as error:
            logger.error("request %s could not be taken", message.id, exc_info=error)
            return refusal(message.id, f"the engine could not take this request: {type(error).__name__}: {error}")

    def _change(self, message: FetchAdapter | LoadAdapter | UnloadAdapter) -> AdapterChanged | None:
        if self._adapters is None:
            return AdapterChanged(message.number, error="no LoRA adapters are served here: start the worker with --max-loras above 0")
        return self._adapters.change(message)
