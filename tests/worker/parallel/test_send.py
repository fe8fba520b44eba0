"""Messages to ranks and nodes that have ended do not block the sender."""

import os
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from tests.worker.execution.planner import make_request

from fairlead_worker.execution.pack import pack
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.parallel import ranks as ranks_module
from fairlead_worker.parallel.lead import to_message, to_step
from fairlead_worker.parallel.links import send_unless_ended
from fairlead_worker.parallel.processes import Processes
from fairlead_worker.parallel.ranks import Ranks
from fairlead_worker.scheduler.plan import Row, StepPlan

DEADLINE = 20.0


def finishes(work: threading.Thread) -> bool:
    """Return whether the work ends, on a thread that may hang without hanging the tests."""
    work.daemon = True
    work.start()
    work.join(DEADLINE)
    return not work.is_alive()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Return the process of rank 1."""
    started = Processes([1], 2, {}, lambda reason: None, parent=str(tmp_path))
    yield started
    started.kill()


def test_a_message_to_a_rank_that_was_killed_is_dropped(processes: Processes) -> None:
    processes.kill()
    assert finishes(threading.Thread(target=processes.send, args=(b"data",)))


def test_a_message_waits_for_a_peer_that_connects_later() -> None:
    context, sent = zmq.Context(), threading.Event()
    socket = context.socket(zmq.PUSH)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def send() -> None:
        send_unless_ended(socket, [b"data"], lambda: False)
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    assert not sent.wait(0.3)
    peer = context.socket(zmq.PULL)
    peer.connect(f"tcp://127.0.0.1:{port}")
    assert peer.poll(int(DEADLINE * 1000)) and peer.recv() == b"data"
    context.destroy(0)


def test_a_step_is_sent_without_a_copy_from_the_device() -> None:
    """Tensors of torch's `meta` device have no data, so reading one fails."""
    request = make_request("a", [10, 11, 12, 13], Sampling(max_tokens=1))
    plan = StepPlan([Row(request, 1, 3, array("i", [7, 2]), samples=True)])
    message = to_message(pack(plan, 2, torch.device("meta")))
    assert message == to_message(pack(plan, 2, torch.device("cpu")))
    assert to_step(message, torch.device("cpu"))[0].tokens.tolist() == [11, 12, 13]


def test_ranks_get_a_step_before_rank_0_plans_it() -> None:
    """So that all of them plan at the same time."""
    events: list[str] = []

    class Backend:
        def plan(self, step: object) -> None:
            events.append("plan")

    class Others:
        @contextmanager
        def run(self, *_: object, **__: object) -> Iterator[None]:
            events.append("send")
            yield

        def share(self, tokens: object) -> None:
            events.append("share")

    runner: Any = ModelRunner.__new__(ModelRunner)
    runner.followers, runner.graphs, runner.backend = Others(), None, Backend()
    runner.forward = lambda step, context: events.append("run")
    runner.run(SimpleNamespace(tokens=None), lambda: events.append("fill"))
    assert events == ["send", "fill", "share", "plan", "run"]


class FakeProcesses:
    def send(self, data: bytes) -> None: ...

    def wait(self, grace: float) -> None: ...

    def kill(self) -> None: ...


def test_a_rank_that_ends_after_the_close_does_not_change_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed rank is noticed up to half a second later, when the main thread may still be about to exit."""
    exits: list[int] = []
    monkeypatch.setattr(ranks_module, "Processes", lambda *_, **__: FakeProcesses())
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    class Config:
        tensor_parallel_size, nnodes, local_ranks = 2, 1, 2

        def model_dump(self) -> dict[str, object]:
            return {}

    class Outbox:
        def send(self, message: object) -> None: ...

    ranks = Ranks(Config(), Outbox())  # type: ignore[arg-type]  # the part of a configuration that is read
    ranks.close(0)
    ranks._on_loss("rank 1 of 2 was killed")
    assert not exits
