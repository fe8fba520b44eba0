"""The engine's loops over an in-process inbox and outbox."""

from array import array
from collections import deque
from collections.abc import Callable

import pytest
from tests.worker.scheduler.engine_model import EngineModel
from tests.worker.scheduler.overlapped import OverlappedModel

from fairlead_worker.engine.loop import run_plain
from fairlead_worker.engine.overlap import run_overlapped
from fairlead_worker.ipc.messages import (
    Abort,
    AdapterChanged,
    Failed,
    FromEngine,
    LoadAdapter,
    Sampling,
    Step,
    Stop,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from fairlead_worker.scheduler.plan import StepPlan, StepResult


class Pipe:
    """Scripted batches of messages in; everything sent is kept. `Stop` once the script is over and the engine rests."""

    def __init__(self, *batches: list[ToEngine]) -> None:
        self.batches = deque(batches)
        self.timeouts: list[float] = []
        self.sent: list[FromEngine] = []

    def receive(self, timeout: float) -> list[ToEngine]:
        self.timeouts.append(timeout)
        if self.batches:
            return self.batches.popleft()
        return [Stop()] if timeout else []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def outputs(self) -> list[tuple[str, int, str | None]]:
        return [(o.id, len(o.tokens) // 4, o.finish) for step in self.sent if isinstance(step, Step) for o in step.each()]


class FakeRunner:
    def __init__(self, machine: EngineModel, fails_at: int = -1) -> None:
        self.machine, self.left = machine, fails_at

    def execute(self, plan: StepPlan) -> StepResult:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("CUDA error: out of cheese")
        return self.machine._forward(plan)


def ask(name: str, tokens: int = 20, max_tokens: int = 3) -> Submit:
    return Submit(name, array("I", range(tokens)).tobytes(), Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), 1)


class Failing(OverlappedModel):
    """Whose device fails at one of its steps."""

    fails_at = -1

    def _forward(self, plan: StepPlan, pending: frozenset[int] | None = None) -> StepResult:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise RuntimeError("CUDA error: out of cheese")
        return super()._forward(plan, pending)


Run = Callable[..., int]


@pytest.fixture(params=["plain", "overlapped"])
def run(request: pytest.FixtureRequest) -> Run:
    """Either loop until `Stop`; its exit status."""

    def plain(pipe: Pipe, fails_at: int = -1) -> int:
        machine = EngineModel(64, 4)
        return run_plain(machine.scheduler, FakeRunner(machine, fails_at), pipe)

    def overlapped(pipe: Pipe, fails_at: int = -1) -> int:
        machine = Failing(64, 4)
        machine.fails_at = fails_at
        return run_overlapped(machine.scheduler, machine, pipe)

    return plain if request.param == "plain" else overlapped


def test_messages_in_steps_out(run: Run) -> None:
    pipe = Pipe([ask("a"), ask("b", max_tokens=1)])
    assert run(pipe) == 0
    assert pipe.outputs() == [("a", 1, None), ("b", 1, "length"), ("a", 1, None), ("a", 1, "length")]
    assert pipe.timeouts[0] == 1.0 and 0.0 in pipe.timeouts, "it waits when idle and only then"
    stored = [event for step in pipe.sent if isinstance(step, Step) for event in step.events]
    assert stored and stored[0].kind == "stored"
    assert all(isinstance(step, Step) and step.load is not None for step in pipe.sent)


def test_an_idle_engine_reports_its_load(run: Run) -> None:
    pipe = Pipe([], [], [])
    assert run(pipe) == 0
    assert len(pipe.sent) == 3 and pipe.timeouts == [1.0] * 4
    assert all(isinstance(step, Step) and not step.outputs and not step.events and step.load for step in pipe.sent)


def test_a_bad_request_is_its_own_error(run: Run) -> None:
    bad = Submit("bad", b"abc", Sampling(max_tokens=1), 1)
    huge = ask("huge", tokens=10_000)
    negative = Submit("negative", array("I", [1]).tobytes(), Sampling(max_tokens=-4), 1)
    broken = Submit("broken", None, Sampling(max_tokens=1), 1)  # type: ignore[arg-type]  # what no decoder lets through
    pipe = Pipe([bad, ask("good"), huge, negative, broken, Abort("unknown")])
    assert run(pipe) == 0
    ends = {name: finish for name, _, finish in pipe.outputs() if finish}
    assert ends == {"bad": "error", "huge": "error", "negative": "error", "broken": "error", "good": "length"}


def test_abort_is_answered_and_ends_the_work(run: Run) -> None:
    pipe = Pipe([ask("a", max_tokens=50)], [], [Abort("a")])
    assert run(pipe) == 0
    assert pipe.outputs()[-1] == ("a", 0, "abort")


def test_a_failed_step_ends_the_engine_with_its_reason(run: Run) -> None:
    pipe = Pipe([ask("a")])
    assert run(pipe, fails_at=2) == 1
    assert isinstance(pipe.sent[-1], Failed) and "out of cheese" in pipe.sent[-1].reason


def test_an_undecodable_message_ends_the_engine_with_its_reason(run: Run) -> None:
    class Broken(Pipe):
        def receive(self, timeout: float) -> list[ToEngine]:
            if self.batches:
                return super().receive(timeout)
            raise ValueError("MessagePack data is malformed")

    pipe = Broken([ask("a", max_tokens=50)])
    assert run(pipe) == 1
    assert isinstance(pipe.sent[-1], Failed) and "MessagePack data is malformed" in pipe.sent[-1].reason


def test_adapters_change_when_no_step_is_in_flight() -> None:
    """The pass of a step that was launched reads the weights that are changed."""
    machine = OverlappedModel(64, 4)
    out: list[bool] = []

    class Weights:
        def __contains__(self, number: int) -> bool:
            return False

        def change(self, message: LoadAdapter | UnloadAdapter) -> AdapterChanged:
            out.append(bool(machine.device.queue) or machine.unread is not None)
            return AdapterChanged(message.number)

    pipe = Pipe([ask("a", max_tokens=9)], [], [], [UnloadAdapter(1)])
    assert run_overlapped(machine.scheduler, machine, pipe, adapters=Weights()) == 0
    assert out == [False] and machine.launched
    assert any(isinstance(message, AdapterChanged) for message in pipe.sent)


@pytest.mark.parametrize("loop", [run_plain, run_overlapped])
def test_a_failed_change_of_adapters_ends_the_engine_with_its_reason(loop: Callable[..., int]) -> None:
    """What cannot be loaded is told; but with a part of the model gone, nothing goes on."""

    class Parted:
        def __contains__(self, number: int) -> bool:
            return False

        def change(self, message: object) -> AdapterChanged:
            raise RuntimeError("out of cheese")

    machine = OverlappedModel(64, 4)
    pipe = Pipe([LoadAdapter(1, "a", "file:///a", "/a")])
    assert loop(machine.scheduler, machine, pipe, adapters=Parted()) == 1
    assert isinstance(pipe.sent[-1], Failed) and "out of cheese" in pipe.sent[-1].reason
