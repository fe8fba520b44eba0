"""Times and traces of the loop, with a clock of the test's own."""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from tests.worker.engine.test_loop import FakeRunner, Pipe, ask
from tests.worker.scheduler.engine_model import VOCABULARY, EngineModel
from tests.worker.scheduler.overlapped import OverlappedModel

from fairlead.schedule.trace import read
from fairlead_worker.engine.loop import run_plain
from fairlead_worker.engine.overlap import run_overlapped
from fairlead_worker.engine.request_timer import MAX_CHUNKS, RequestTimer
from fairlead_worker.engine.schedule_trace import ScheduleTrace
from fairlead_worker.ipc.messages import Abort, Output, Step
from fairlead_worker.scheduler.plan import StepPlan, StepResult


class Clock:
    """Stands still but for the runner."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowRunner(FakeRunner):
    """10 ms a step and 1 ms for each prompt token in it."""

    def __init__(self, machine: EngineModel, clock: Clock) -> None:
        super().__init__(machine)
        self.clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        result.seconds = 0.010 + 0.001 * plan.prefill_tokens
        self.clock.now += result.seconds
        return result


def run(pipe: Pipe, trace: ScheduleTrace | None = None, clock: Clock | None = None, pages: int = 64, **config: object) -> list[Step]:
    clock, machine = clock or Clock(), EngineModel(pages, 4, **config)  # type: ignore[arg-type]  # the scheduler's settings
    watch = RequestTimer(trace, clock)
    assert run_plain(machine.scheduler, SlowRunner(machine, clock), pipe, watch) == 0
    watch.close()
    assert not watch._times and not watch._traced, "nothing is kept of requests that are over"
    return [step for step in pipe.sent if isinstance(step, Step)]


def outputs(steps: list[Step], name: str) -> list[Output]:
    return [output for step in steps for output in step.each() if output.id == name]


def test_chunks_of_a_traced_prompt_come_with_the_first_token() -> None:
    traced, plain = msgspec.structs.replace(ask("a", tokens=20, max_tokens=2), traced=True), ask("b", tokens=9, max_tokens=2)
    steps = run(Pipe([traced, plain]), chunked_prefill_size=8, max_prefill_tokens=8)
    (of_a,) = (output.timing for output in outputs(steps, "a") if output.timing is not None)
    (of_b,) = (output.timing for output in outputs(steps, "b") if output.timing is not None)
    assert of_b.chunks == ()
    assert sum(chunk.tokens for chunk in of_a.chunks) == 20 and len(of_a.chunks) >= 3
    ends = [chunk.start + chunk.tokens for chunk in of_a.chunks]
    assert [0, *ends[:-1]] == [chunk.start for chunk in of_a.chunks], "each begins where the one before ended"
    assert all(before.started + before.seconds <= after.started + 1e-9 for before, after in pairwise(of_a.chunks))
    assert sum(chunk.seconds for chunk in of_a.chunks) <= of_a.prefill_seconds + 1e-9


def test_a_very_long_prompt_has_a_bounded_number_of_chunks() -> None:
    steps = run(
        Pipe([msgspec.structs.replace(ask("a", tokens=400, max_tokens=1), traced=True)]),
        pages=128,
        chunked_prefill_size=4,
        max_prefill_tokens=4,
    )
    (timing,) = (output.timing for output in outputs(steps, "a") if output.timing is not None)
    assert len(timing.chunks) == MAX_CHUNKS and sum(chunk.tokens for chunk in timing.chunks) == 400


def test_queue_and_prefill_time_come_with_the_first_token() -> None:
    steps = run(Pipe([ask("a", max_tokens=9)], [], [ask("b", tokens=15)]))
    first, *rest = outputs(steps, "a")
    assert first.timing is not None and first.timing.queue_seconds == 0
    until = next(number for number, step in enumerate(steps) if first in step.each())
    assert first.timing.prefill_seconds == pytest.approx(sum(step.seconds for step in steps[: until + 1]))
    assert all(output.timing is None for output in rest)
    assert outputs(steps, "b")[0].timing is not None


def test_a_request_waits_from_when_it_was_asked_for() -> None:
    """The step that was on its way then is part of the wait."""
    steps = run(Pipe([msgspec.structs.replace(ask("a"), received_at=99.6)]))
    timing = outputs(steps, "a")[0].timing
    assert timing is not None and timing.queue_seconds == pytest.approx(0.4)


class LateRunner(FakeRunner):
    """The mask of each first token is late, so the token comes in the next step, as a decode."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if plan.prefill_tokens:
            result.tokens = [[] for _ in result.tokens]
        return result


def test_a_first_token_that_was_late_has_its_times_and_what_was_cached() -> None:
    pipe, machine = Pipe([ask("a")], [], [], [], [], [ask("b")]), EngineModel(64, 4)
    assert run_plain(machine.scheduler, LateRunner(machine), pipe) == 0
    steps = [step for step in pipe.sent if isinstance(step, Step)]
    for name, cached in (("a", 0), ("b", 16)):
        first, second, last = outputs(steps, name)
        assert (first.cached_tokens, second.timing, last.finish) == (cached, None, "length")
        assert first.timing is not None and first.timing.prefill_seconds > 0
    assert [step.decoded.ids for step in steps if step.decoded.ids] == [("a",), ("b",)], "their second tokens"


@pytest.mark.parametrize("ahead", [True, False])
def test_preemptions_are_reported_with_the_next_token(ahead: bool) -> None:
    a, b = (ask(name, tokens=9, max_tokens=16) for name in "ab")  # 7 pages of 4 tokens each, at their end, and none in common
    settings = {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    pipe, machine = Pipe([a, msgspec.structs.replace(b, root=2)]), (OverlappedModel if ahead else EngineModel)(8, 4, **settings)
    run_loop = run_overlapped if ahead else run_plain
    assert run_loop(machine.scheduler, machine if ahead else FakeRunner(machine), pipe) == 0  # type: ignore[operator]
    steps = [step for step in pipe.sent if isinstance(step, Step)]
    assert [output.timing.preemptions for output in outputs(steps, "a") if output.timing is not None] == [0]
    told = {place: output.timing.preemptions for place, output in enumerate(outputs(steps, "b")) if output.timing is not None}
    assert told == {0: 0, 8: 1}, "with its ninth token, the first one after it had to go"


def test_what_prefill_costs_the_decodes_beside_it() -> None:
    steps = run(Pipe([ask("a", tokens=3, max_tokens=30)], [], [], [], [ask("b", tokens=8, max_tokens=2)]))
    mixed = [step for step in steps if step.decodes and step.prefill_tokens]
    assert mixed and all(step.stall_seconds == pytest.approx(0.001 * step.prefill_tokens) for step in mixed)
    assert not any(step.stall_seconds for step in steps if step not in mixed)
    assert all(step.stalled == step.decodes for step in mixed)


def test_decodes_that_a_step_leaves_out_wait_for_all_of_it() -> None:
    first = [ask("a", tokens=3, max_tokens=30), ask("b", tokens=3, max_tokens=30)]
    steps = run(Pipe(first, [], [], [ask("c", tokens=9)]), enable_mixed_chunk=False)
    (apart,) = (step for step in steps[1:] if step.prefill_tokens)
    assert (apart.decodes, apart.stalled, apart.stall_seconds) == (0, 2, apart.seconds)
    assert not any(step.stalled for step in steps if step is not apart)


def test_waiting_for_others_is_queue_time_and_aborts_leave_nothing() -> None:
    # 8 pages of 4 tokens: the second of 20 tokens has to wait for the first, the third goes before it is admitted.
    steps = run(Pipe([ask("a", tokens=20, max_tokens=4), ask("b", tokens=21, max_tokens=2), ask("c", tokens=22)], [Abort("c")]), pages=8)
    timing = outputs(steps, "b")[0].timing
    assert timing is not None and timing.queue_seconds > 0.030


def test_a_trace_has_every_row(tmp_path: Path) -> None:
    path, clock = tmp_path / "trace", Clock()
    steps = run(Pipe([ask("a", max_tokens=3)]), ScheduleTrace(path, {"page_size": 4}, clock), clock)
    about, *lines = map(json.loads, path.read_text().splitlines())
    assert about == {"format": "fairlead-schedule-1", "page_size": 4}
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert [line["seconds"] for line in lines] == pytest.approx([step.seconds for step in steps if step.seconds])
    rows = [row for line in lines for row in line["rows"]]
    assert sum(count for _, _, count, _ in rows) == 22, "20 of the prompt, two of three output tokens"
    assert rows[-1] == ["a", 21, 1, True]
    assert [start for _, start, _, _ in rows] == [sum(count for _, _, count, _ in rows[:at]) for at in range(len(rows))]


@pytest.mark.parametrize("right", [True, False])
def test_a_trace_of_decodes_that_speculate_is_read_as_such(right: bool, tmp_path: Path) -> None:
    clock, machine = Clock(), EngineModel(64, 4, speculative_method="draft")
    machine.guess = lambda token: token if right and token % 3 else VOCABULARY
    trace = ScheduleTrace(tmp_path / "trace", {}, clock)
    pipe = Pipe([ask("a", tokens=9, max_tokens=20)], [ask("b", tokens=5, max_tokens=20)])
    assert run_plain(machine.scheduler, SlowRunner(machine, clock), pipe, RequestTimer(trace, clock)) == 0
    trace.close()
    told = [step for step in pipe.sent if isinstance(step, Step) and step.seconds]
    drawn = read(tmp_path / "trace").steps
    assert [(step.prefill_tokens, step.decodes) for step in drawn] == [(step.prefill_tokens, step.decodes) for step in told]
    assert any(row.count > 1 for step in drawn for row in step.rows if row.decode)


def test_a_full_disk_ends_the_trace_and_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = ScheduleTrace(tmp_path / "trace", {})
    trace._file.close()
    trace._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115  # the trace closes it
    steps = run(Pipe([ask("a", max_tokens=3)]), trace)
    assert outputs(steps, "a")[-1].finish == "length"
    assert caplog.text.count("no more of it is written") == 1
