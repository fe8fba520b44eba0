"""Requests wait for their grammars before the scheduler, and other requests do not wait with them."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import cast

from tests.worker.engine.test_loop import FakeRunner, Pipe, ask
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_worker.engine.grammar_queue import GrammarQueue
from fairlead_worker.engine.loop import MessageHandler, run_plain
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.ipc.messages import GRAMMAR_WAITED, Load, Output, Step, Submit, ToEngine
from fairlead_worker.scheduler.scheduler import Scheduler


class Compiler:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[str, Future[str]] = {}
        self.patience = 60.0

    def compile(self, grammar: str) -> "Future[str]":
        return self.asked.setdefault(grammar, Future())


def submit(name: str, grammar: str = "") -> Submit:
    message = ask(name)
    return Submit(name, message.tokens, message.sampling, message.root, grammar=grammar)


def test_plain_requests_pass_and_others_follow_when_theirs_is_ready() -> None:
    through: list[str] = []

    def take(message: Submit) -> Output | None:
        through.append(message.id)
        return None

    compiler = Compiler()
    handler = MessageHandler(cast(Scheduler, SimpleNamespace(submit=take)), Pipe(), RequestTimer(), compiler=compiler)
    gate = handler._grammar_queue
    assert handler.serve([submit("a", "slow"), submit("b"), submit("c", "quick"), submit("d", "slow")]) == []
    assert through == ["b"]
    compiler.asked["quick"].set_result("")
    assert gate.submit_ready() == []
    assert through == ["b", "c"]
    compiler.asked["slow"].set_result("")
    assert gate.submit_ready() == []
    assert through == ["b", "c", "a", "d"]
    assert gate.submit(submit("e", "slow")) is None
    assert through[-1] == "e", "known by now"
    assert not len(gate)


def test_an_invalid_grammar_is_refused_and_an_aborted_request_is_not_submitted() -> None:
    compiler = Compiler()
    gate = GrammarQueue(lambda message: None, compiler)
    assert gate.submit(submit("a", "bad")) is None
    assert gate.submit(submit("b", "bad")) is None
    again = gate.submit(submit("a", "bad"))
    assert again is not None and "already exists" in again.error
    aborted = gate.abort("b")
    assert aborted is not None and aborted.finish == "abort"
    compiler.asked["bad"].set_result("no such rule")
    (refusal,) = gate.submit_ready()
    assert (refusal.id, refusal.finish) == ("a", "error")
    assert "no such rule" in refusal.error


def test_an_engine_without_grammars_refuses_them() -> None:
    answer = GrammarQueue(lambda message: None).submit(submit("a", "any"))
    assert answer is not None and "no structured output" in answer.error


def test_the_loop_looks_for_grammars_while_it_is_idle() -> None:
    """An engine with nothing else to do does not sleep until its heartbeat."""
    compiler = Compiler()

    class Slow(Pipe):
        def receive(self, timeout: float) -> list[ToEngine]:
            if len(self.timeouts) == 2:
                compiler.asked["slow"].set_result("")
            return super().receive(timeout)

    pipe, machine = Slow([submit("a", "slow")], [], []), EngineModel(64, 4)
    assert run_plain(machine.scheduler, FakeRunner(machine), pipe, compiler=compiler) == 0
    assert pipe.timeouts[0] == 1.0
    assert 0 < max(pipe.timeouts[1:3]) < 0.1
    assert pipe.outputs()[-1] == ("a", 1, "length")
    loads = [step.load for step in pipe.sent if isinstance(step, Step) and step.load is not None]
    assert (loads[0].waiting, loads[0].backlog_tokens) == (1, len(ask("a").tokens) // 4), "routers and metrics see the waiting request"
    assert (loads[-1].waiting, loads[-1].backlog_tokens) == (0, 0)


def test_no_request_waits_longer_than_the_grammars_before_it_may_take() -> None:
    now, compiler = [0.0], Compiler()
    gate = GrammarQueue(lambda message: None, compiler, lambda: now[0])
    assert gate.submit(submit("a", "stuck")) is None
    now[0] = compiler.patience
    assert gate.submit_ready() == [] and gate.add_to_load(Load()).waiting == 1
    now[0] += 0.1
    (refused,) = gate.submit_ready()
    assert refused.finish == "error" and refused.error.startswith(GRAMMAR_WAITED)
    assert not len(gate) and gate.add_to_load(Load()) == Load()
