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
"""How often an engine that has nothing else to do looks whether a grammar is ready."""


class GrammarCompiler(Protocol):
    """Whoever compiles grammars, on threads of its own."""

    def compile(self, grammar: str) -> "Future[str]":
        """Comes with an empty string, or with the reason why it does not compile. Grammars used lately are there at once."""
        ...

    @property
    def patience(self) -> float:
        """Seconds that the grammar which was asked for last may take, those before it included."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits. `until`: seconds of the grammar_queue's clock; `patience`: how long that was from the start."""

    message: Submit
    compiled: "Future[str]"
    patience: float
    until: float


class GrammarQueue:
    """Lets requests without a grammar through at once, the others in the order in which their grammars get ready."""

    def __init__(
        self,
        submit: Callable[[Submit], Output | None],
        compiler: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._submit, self._compiler, self._clock = submit, compiler, clock
        self._waiting_requests: dict[str, _Waiting] = {}
        self._tokens = 0
        """Of the prompts of those that wait."""

    def __len__(self) -> int:
        return len(self._waiting_requests)

    def submit(self, message: Submit) -> Output | None:
        """As the scheduler's, now or later."""
        if not message.grammar:
            return self._submit(message)
        if self._compiler is None:
            return refusal(message.id, "this engine does no structured output")
        if message.id in self._waiting_requests:
            return refusal(message.id, f"a request with the id {message.id!r} already exists")
        compiled = self._compiler.compile(message.grammar)
        if compiled.done():
            return self._submit_compiled(message, compiled)
        patience = self._compiler.patience
        self._waiting_requests[message.id] = _Waiting(message, compiled, patience, self._clock() + patience)
        self._tokens += len(message.tokens) // TOKEN_BYTES
        return None

    def abort(self, request_id: str) -> Output | None:
        """The end of a request that waits here; None where it does not."""
        return Output(request_id, b"", 0, finish="abort") if request_id in self._waiting_requests and self._take(request_id) else None

    def submit_ready(self) -> list[Output]:
        """Submits those whose grammars are ready: refusals, if any, of those too that have waited too long."""
        now, answers = self._clock(), list[Output | None]()
        for name in [name for name, held in self._waiting_requests.items() if held.compiled.done() or now > held.until]:
            held = self._take(name)
            late = not held.compiled.done()
            answers.append(
                refusal(name, f"{GRAMMAR_WAITED} {held.patience:g} s") if late else self._submit_compiled(held.message, held.compiled)
            )
        return [answer for answer in answers if answer is not None]

    def add_to_load(self, load: Load) -> Load:
        """Return the scheduler's load with the requests that wait here, which it does not know of."""
        if not self._waiting_requests:
            return load
        return msgspec.structs.replace(load, waiting=load.waiting + len(self), backlog_tokens=load.backlog_tokens + self._tokens)

    def _take(self, name: str) -> _Waiting:
        held = self._waiting_requests.pop(name)
        self._tokens -= len(held.message.tokens) // TOKEN_BYTES
        return held

    def _submit_compiled(self, message: Submit, compiled: "Future[str]") -> Output | None:
        error = compiled.exception()
        reason = str(error) if error is not None else compiled.result()
        return refusal(message.id, f"its grammar does not compile: {reason}") if reason else self._submit(message)
