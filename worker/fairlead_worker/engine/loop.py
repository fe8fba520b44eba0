"""The engine's loop: messages in, steps, messages out. The transport and the model are whoever fits the protocols."""

import logging
from collections.abc import Callable
from typing import Protocol

from fairlead_worker.cache.hot import hottest
from fairlead_worker.engine.gate import POLL_SECONDS, Gate, GrammarCompiler
from fairlead_worker.engine.intake import refusal
from fairlead_worker.engine.plan import Runner, StepResult
from fairlead_worker.engine.scheduler import Scheduler
from fairlead_worker.engine.watch import StepWatch
from fairlead_worker.messages import (
    Abort,
    AdapterChanged,
    AskHot,
    Failed,
    FromEngine,
    Hot,
    LoadAdapter,
    Output,
    Stop,
    Submit,
    ToEngine,
    UnloadAdapter,
)

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

    def change(self, message: LoadAdapter | UnloadAdapter) -> AdapterChanged:
        """Never raises: what cannot be loaded is told, and everything else goes on."""
        ...


def run_plain(
    scheduler: Scheduler,
    runner: Runner,
    inbox: Inbox,
    outbox: Outbox,
    watch: StepWatch | None = None,
    adapters: Adapters | None = None,
    compiler: GrammarCompiler | None = None,
) -> int:
    """Plans, executes and reports step after step until `Stop` (returns 0) or until a step fails (sends `Failed`, returns 1).

    Every step is reported, and every second of idleness: a silent engine is a dead one.
    """
    busy = False
    watch = watch or StepWatch()
    gate = Gate(_guarded(scheduler), compiler)
    while True:
        outputs: list[Output] = []
        for message in inbox.receive(0.0 if busy else POLL_SECONDS if gate else HEARTBEAT_SECONDS):
            if isinstance(message, Stop):
                return 0
            if isinstance(message, LoadAdapter | UnloadAdapter):
                outbox.send(_change(adapters, message))
                continue
            if isinstance(message, AskHot):
                outbox.send(Hot(hottest(scheduler.cache, message.tokens)))
                continue
            watch.received(message)
            answer = receive(scheduler, gate, message, adapters)
            if answer is not None:
                outputs.append(answer)
        if gate:
            outputs += gate.opened()
        try:
            plan, result = scheduler.plan(), StepResult([])
            busy = bool(plan)
            if busy:
                watch.planned(plan)
                result = runner.execute(plan)
            watch.executed(plan, result)
            if busy:
                outputs += scheduler.advance(plan, result)
        except Exception as error:
            logger.exception("step %d failed", scheduler.meter.steps)
            outbox.send(Failed(reason=f"step {scheduler.meter.steps} failed: {type(error).__name__}: {error}"))
            return 1
        outbox.send(watch.report(plan, result, outputs, scheduler.drain_events(), scheduler.load()))


def receive(scheduler: Scheduler, gate: Gate, message: Submit | Abort, adapters: Adapters | None = None) -> Output | None:
    """Gives one message to the scheduler, or to the gate before it. Whatever is wrong with it is that request's error and nobody else's."""
    if isinstance(message, Abort):
        return gate.abort(message.id) or scheduler.abort(message.id)
    if message.adapter and (adapters is None or message.adapter not in adapters):
        return refusal(message.id, "its LoRA adapter is not loaded (any more)")
    try:
        return gate.submit(message)
    except Exception as error:
        return _not_taken(message, error)


def _guarded(scheduler: Scheduler) -> Callable[[Submit], Output | None]:
    """The scheduler's `submit`, for the gate: whose grammar gets ready later has nobody else to catch what goes wrong."""

    def submit(message: Submit) -> Output | None:
        try:
            return scheduler.submit(message)
        except Exception as error:
            return _not_taken(message, error)

    return submit


def _not_taken(message: Submit, error: Exception) -> Output:
    logger.error("request %s could not be taken", message.id, exc_info=error)
    return refusal(message.id, f"the engine could not take this request: {type(error).__name__}: {error}")


def _change(adapters: Adapters | None, message: LoadAdapter | UnloadAdapter) -> AdapterChanged:
    if adapters is None:
        return AdapterChanged(message.number, error="no LoRA adapters are served here: start the worker with --max-loras above 0")
    return adapters.change(message)
