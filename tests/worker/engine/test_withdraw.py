"""Requests leave the engine together and only before they start."""

from array import array
from concurrent.futures import Future

import pytest
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_worker.engine.grammar_queue import GrammarQueue
from fairlead_worker.engine.loop import withdraw
from fairlead_worker.ipc.messages import WITHDRAWN, Sampling, Submit


class Compiler:
    """Never finishes."""

    patience = 60.0

    def compile(self, grammar: str) -> "Future[str]":
        return Future()


@pytest.mark.parametrize("started", [False, True])
def test_all_sequences_of_a_request_leave_or_none(started: bool) -> None:
    machine = EngineModel(256, 4, max_num_seqs=1)
    queue = GrammarQueue(machine.scheduler.submit, Compiler())
    first, second = (machine.submit([1, 2, 3, number], 8, ignore_eos=True) for number in range(2))
    queue.submit(Submit("compiling", array("I", (1, 2)).tobytes(), Sampling(max_tokens=1), 1, grammar="a"))
    ids = (second, "compiling")
    if started:
        machine.step()
        ids = (first, *ids)
    outputs = withdraw(machine.scheduler, queue, ids)
    assert [output.id for output in outputs] == ([] if started else list(ids))
    assert {(output.finish, output.error) for output in outputs} <= {("error", WITHDRAWN)}
    assert ("compiling" in queue) == started and machine.scheduler.is_untouched(second) == started
    assert not withdraw(machine.scheduler, queue, ("unknown",))
    if not started:
        machine.told.pop(second)
    machine.run()
    machine.check_answers()


def test_a_preempted_request_has_started() -> None:
    machine = EngineModel(256, 4, max_num_seqs=1)
    batch = machine.submit([1, 2, 3], 8, ignore_eos=True, priority=9)
    machine.step()
    machine.submit([4, 5], 8, ignore_eos=True)
    machine.step()
    assert machine.scheduler._requests[batch].lease is None and machine.scheduler.load().preemptions == 1
    assert not withdraw(machine.scheduler, GrammarQueue(machine.scheduler.submit), (batch,))
    machine.run()
    machine.check_answers()
