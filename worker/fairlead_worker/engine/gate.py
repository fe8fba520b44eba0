"""Where requests wait for their grammar to be compiled, before the scheduler knows of them. Nobody else waits with them."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from fairlead_worker.engine.intake import refusal
from fairlead_worker.messages import Output, Submit

POLL_SECONDS = 0.005
"""How often an engine that has nothing else to do looks whether a grammar is ready."""


class GrammarCompiler(Protocol):
    """Whoever compiles grammars, on threads of its own."""

    def compile(self, grammar: str) -> "Future[str]":
        """Comes with an empty string, or with the reason why it does not compile. Grammars used lately are there at once."""
        ...


class Gate:
    """Lets requests without a grammar through at once, the others in the order in which their grammars get ready."""

    def __init__(self, submit: Callable[[Submit], Output | None], compiler: GrammarCompiler | None = None) -> None:
        self._submit = submit
        self._compiler = compiler
        self._held: dict[str, tuple[Submit, Future[str]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def submit(self, message: Submit) -> Output | None:
        """As the scheduler's, now or later."""
        if not message.grammar:
            return self._submit(message)
        if self._compiler is None:
            return refusal(message.id, "this engine does no structured output")
        if message.id in self._held:
            return refusal(message.id, f"a request with the id {message.id!r} is already here")
        compiled = self._compiler.compile(message.grammar)
        if compiled.done():
            return self._through(message, compiled)
        self._held[message.id] = message, compiled
        return None

    def abort(self, request_id: str) -> Output | None:
        """The end of a request that waits here; None where it does not."""
        return Output(request_id, b"", 0, finish="abort") if self._held.pop(request_id, None) else None

    def opened(self) -> list[Output]:
        """Submits those whose grammars are ready: refusals, if any."""
        ready = [name for name, (_, compiled) in self._held.items() if compiled.done()]
        answers = [self._through(*self._held.pop(name)) for name in ready]
        return [answer for answer in answers if answer is not None]

    def _through(self, message: Submit, compiled: "Future[str]") -> Output | None:
        error = compiled.exception()
        reason = str(error) if error is not None else compiled.result()
        return refusal(message.id, f"its grammar does not compile: {reason}") if reason else self._submit(message)
