"""Queue of requests whose grammar is being compiled. The scheduler gets them afterwards, and other requests do not wait."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fairlead_worker.ipc.messages import GRAMMAR_WAITED, Load, Output, Submit
from fairlead_worker.scheduler.validation import refusal

TOKEN_BYTES = 4
POLL_SECONDS = 0.005
"""Interval in which an idle engine checks whether a grammar is ready."""


class GrammarCompiler(Protocol):
    """Compiles grammars on its own threads."""

    def compile(self, grammar: str) -> "Future[str]":
        """Start to compile a grammar. The result is empty, or the reason why it does not compile. Recent grammars are ready at once."""
        ...

    @property
    def patience(self) -> float:
        """Seconds that the latest grammar may take, including the grammars before it."""
        ...


@dataclass(frozen=True, slots=True)
class _WaitingRequest:
    """A request whose grammar is being compiled."""

    message: Submit
    compiled: "Future[str]"
    patience: float
    """Seconds that it may wait."""
    deadline: float
    """Seconds of the queue's clock."""


class GrammarQueue:
    """Submits requests with a grammar in the order in which their grammars are compiled."""

    def __init__(
        self,
        submit: Callable[[Submit], Output | None],
        compiler: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._submit, self._compiler, self._clock = submit, compiler, clock
        self._waiting_requests: dict[str, _WaitingRequest] = {}
        self._tokens = 0
        """Prompt tokens of the waiting requests."""

    def __len__(self) -> int:
        return len(self._waiting_requests)

    def submit(self, message: Submit) -> Output | None:
        """Submit a request to the scheduler, now or when its grammar is compiled. Return a refusal, if any."""
        if self._compiler is None:
            return refusal(message.id, "this engine does no structured output")
        if message.id in self._waiting_requests:
            return refusal(message.id, f"a request with the id {message.id!r} already exists")
        compiled = self._compiler.compile(message.grammar)
        if compiled.done():
            return self._submit_compiled(message, compiled)
        patience = self._compiler.patience
        self._waiting_requests[message.id] = _WaitingRequest(message, compiled, patience, self._clock() + patience)
        self._tokens += len(message.tokens) // TOKEN_BYTES
        return None

    def abort(self, request_id: str) -> Output | None:
        """Drop a request that waits here and return its output. Return None for other requests."""
        return Output(request_id, b"", 0, finish="abort") if request_id in self._waiting_requests and self._take(request_id) else None

    def submit_ready(self) -> list[Output]:
        """Submit the requests whose grammars are compiled. Return refusals, also of requests that have waited too long."""
        now, refusals = self._clock(), list[Output]()
        for name in [name for name, each in self._waiting_requests.items() if each.compiled.done() or now > each.deadline]:
            waiting = self._take(name)
            if not waiting.compiled.done():
                refusals.append(refusal(name, f"{GRAMMAR_WAITED} {waiting.patience:g} s"))
            elif (refused := self._submit_compiled(waiting.message, waiting.compiled)) is not None:
                refusals.append(refused)
        return refusals

    def add_to_load(self, load: Load) -> Load:
        """Return the scheduler's load plus the requests that wait here."""
        if not self._waiting_requests:
            return load
        return msgspec.structs.replace(load, waiting=load.waiting + len(self), backlog_tokens=load.backlog_tokens + self._tokens)

    def _take(self, name: str) -> _WaitingRequest:
        waiting = self._waiting_requests.pop(name)
        self._tokens -= len(waiting.message.tokens) // TOKEN_BYTES
        return waiting

    def _submit_compiled(self, message: Submit, compiled: "Future[str]") -> Output | None:
        error = compiled.exception()
        reason = str(error) if error is not None else compiled.result()
        return refusal(message.id, f"its grammar does not compile: {reason}") if reason else self._submit(message)
