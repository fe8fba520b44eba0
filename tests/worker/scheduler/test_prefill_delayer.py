"""Prefill waits for a wave of requests, within its bounds, and for nobody else."""

from array import array

import pytest
from tests.worker.engine.test_loop import Pipe

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.loop import run_plain
from fairlead_worker.messages import FromEngine, Sampling, Step, Stop, Submit, ToEngine
from fairlead_worker.scheduler import prefill_delayer as gathering
from fairlead_worker.scheduler.config import PolicyName, SchedulerConfig
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.prefill_delayer import FRESH_SECONDS, MOST_SECONDS, MOST_WAITING, SILENCE, PrefillDelayer
from fairlead_worker.scheduler.scheduler import Scheduler

PROMPT = 100
DECODE_SECONDS = 0.001
STEP_SECONDS = 0.02
"""Of each step: 5,000 prompt tokens a second where it computes one prompt."""


def ask(number: int, max_tokens: int = 1, first: int | None = None, length: int = PROMPT) -> Submit:
    tokens = array("I", [number if first is None else first, *range(1, length)])
    return Submit(str(number), tokens.tobytes(), Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), 1)


class Bench:
    """A scheduler whose prefill rate is known, and a clock that is moved by hand."""

    def __init__(self, percent: int = 10, policy: PolicyName = "lpm") -> None:
        config = SchedulerConfig(
            max_model_len=400, chunked_prefill_size=1000, idle_prefill_chunks=2, prefill_delay_percent=percent, policy=policy
        )
        self.scheduler = Scheduler(config, PrefixCache(PagePool(5000, 4), 16, extend))
        self.now = 100.0
        self.delayer = PrefillDelayer(self.scheduler, lambda: self.now)
        self.asked = 0
        self.wave(1)
        self.now += 10.0

    def come(self, count: int, max_tokens: int = 1, first: int | None = None) -> float:
        """So many requests; how long they wait."""
        for _ in range(count):
            self.asked += 1
            assert self.scheduler.submit(ask(self.asked, max_tokens, first)) is None
        return self.delayer.seconds()

    def wave(self, count: int, first: int | None = None) -> None:
        """So many requests that have come and ended."""
        self.come(count, first=first)
        while plan := self.scheduler.plan():
            self.step(plan)
        assert not self.delayer.seconds(), "nobody waits"

    def step(self, plan: StepPlan) -> None:
        seconds = STEP_SECONDS * plan.prefill_tokens / PROMPT or DECODE_SECONDS
        self.scheduler.advance(plan, StepResult([[7] for row in plan.rows if row.samples], seconds=seconds))


LULL = pytest.approx(SILENCE * 0.1 * STEP_SECONDS)
"""What one prompt waits of which nothing is expected."""


def test_the_first_of_a_wave_waits_for_the_others() -> None:
    bench = Bench()
    bench.wave(8)
    assert bench.come(1) == pytest.approx(0.1 * 8 * STEP_SECONDS), "a tenth of what all eight will take"
    bench.now += 0.004
    assert bench.come(6) == pytest.approx(0.1 * 8 * STEP_SECONDS - 0.004), "it counts from the first on"
    bench.now += 0.004
    assert not bench.come(1), "all are there"


def test_what_does_not_come_is_not_waited_for_longer() -> None:
    bench = Bench()
    bench.wave(8)
    assert bench.come(1)
    bench.now += 0.017
    assert not bench.delayer.seconds()


def test_a_first_wave_is_waited_for_until_nobody_comes() -> None:
    bench = Bench()
    assert bench.come(1) == LULL
    bench.now += 0.0004
    assert bench.come(1) == pytest.approx(SILENCE * 0.1 * 2 * STEP_SECONDS), "from the last one on"
    for _ in range(20):
        bench.now += 0.001
        bench.come(0)
    assert not bench.delayer.seconds()


def test_those_that_trickle_in_wait_for_a_share_of_what_they_take_at_most() -> None:
    bench = Bench()
    came, waited = 1, bench.come(1)
    while waited:
        bench.now += 0.9 * waited
        came, waited = came + 1, bench.come(1)
    assert bench.now - 110.0 <= 0.1 * came * STEP_SECONDS


def test_no_wait_is_long() -> None:
    bench = Bench(percent=100)
    bench.wave(8)
    assert bench.come(1) == pytest.approx(MOST_SECONDS)


def test_what_is_cached_is_not_waited_for() -> None:
    bench = Bench()
    bench.wave(2, first=7)
    assert 0 < bench.come(1, first=7) < 0.1 * 2 * STEP_SECONDS / 10


def test_who_is_expected_is_waited_for_as_long_as_a_step_takes() -> None:
    """The first that is back has a prompt that is cached, and says nothing of the others'."""
    bench = Bench()
    bench.come(2, max_tokens=40, first=7)
    while plan := bench.scheduler.plan():
        bench.step(plan)
    bench.delayer.seconds()
    pace = bench.scheduler.stats.step_seconds
    assert bench.come(1, first=7) == pytest.approx(pace)
    assert pace > 2 * 0.1 * 4 / PROMPT * STEP_SECONDS, "more than their share of what is not cached"


def test_ends_of_a_while_ago_say_nothing() -> None:
    bench = Bench()
    bench.wave(8)
    bench.now += FRESH_SECONDS + 0.001
    assert bench.come(1) == LULL


def test_a_client_alone_does_not_wait() -> None:
    bench = Bench()
    assert bench.come(1) == LULL, "others might come"
    for _ in range(3):
        bench.wave(0)
        assert not bench.come(1), "it is back, and nobody else has ended"


def beside_streams(left: int, longer: int = 0) -> Bench:
    """Four streams with so many tokens to come, one of them with some more, at a pace that is known."""
    bench = Bench()
    bench.come(3, max_tokens=80)
    bench.come(1, max_tokens=80 + longer)
    for _ in range(80 - left):
        bench.step(bench.scheduler.plan())
    bench.delayer.seconds()
    assert bench.scheduler.stats.step_seconds == pytest.approx(DECODE_SECONDS, rel=0.05)
    return bench


def test_streams_that_are_about_to_end_are_waited_for() -> None:
    bench = beside_streams(left=3)
    wait = 0.1 * 5 * STEP_SECONDS
    assert bench.come(1) == pytest.approx(wait), "a tenth of what all five will take"
    for passed in (1, 2, 3):
        plan = bench.scheduler.plan(admit=False)
        assert plan.decodes == len(plan.rows) == 4, passed
        bench.step(plan)
        bench.now += DECODE_SECONDS
        assert bench.delayer.seconds() == pytest.approx(wait - passed * DECODE_SECONDS), passed
    assert not bench.scheduler.running
    assert bench.come(3), "one of four is missing"
    assert not bench.come(1), "all are there"


def test_beside_streams_that_go_on_nobody_waits() -> None:
    assert not beside_streams(left=11).come(1), "the wait for all five is ten steps"
    assert not beside_streams(left=3, longer=20).come(1), "one of them goes on"
    bench = beside_streams(left=30)
    bench.come(8)
    bench.step(bench.scheduler.plan())  # the eight have ended
    assert not bench.come(1)


def test_who_ends_too_late_is_not_waited_for() -> None:
    bench = beside_streams(left=3)
    assert bench.come(1)
    bench.now += 0.1 * 5 * STEP_SECONDS - 2.5 * DECODE_SECONDS
    assert not bench.delayer.seconds()


def test_nobody_waits_for_streams_of_unknown_pace() -> None:
    bench = Bench()
    bench.come(1, max_tokens=2)
    bench.step(bench.scheduler.plan())
    assert not bench.come(1), "no step with decodes has been measured"


def test_streams_that_drain_are_forgotten() -> None:
    bench = Bench()
    for _ in range(50):
        bench.wave(1)
        bench.now += 0.02
    bench.scheduler.ended += 50
    bench.delayer.seconds()
    bench.now += FRESH_SECONDS + 0.01
    bench.wave(1)
    bench.scheduler.ended += 1
    bench.delayer.seconds()
    assert bench.come(1) == pytest.approx(0.1 * 2 * STEP_SECONDS), "one of two that ended lately is back"


def test_a_full_step_waits_for_nobody() -> None:
    bench = Bench()
    bench.wave(30)
    assert bench.come(19)
    assert not bench.come(1), "2,000 tokens"


def test_a_prompt_that_is_partly_computed_waits_for_nobody() -> None:
    bench = beside_streams(left=1)
    bench.step(bench.scheduler.plan())
    bench.come(19)
    assert bench.scheduler.submit(ask(999, length=150)) is None
    bench.step(bench.scheduler.plan())
    assert bench.scheduler.running == [bench.scheduler.chunked_req]
    bench.delayer.seconds()
    assert not bench.come(1), "nor do those beside it, though 19 have just ended"


def test_a_queue_for_room_waits_for_nobody() -> None:
    bench = Bench()
    assert bench.come(3)
    bench.now += MOST_SECONDS
    assert not bench.come(0)
    bench.scheduler.ended += 2
    assert not bench.come(1)


def test_where_there_are_priorities_nobody_waits() -> None:
    bench = Bench(policy="priority")
    bench.wave(8)
    assert not bench.come(1)


def test_a_crowd_does_not_wait() -> None:
    bench = Bench()
    bench.wave(2 * MOST_WAITING)
    assert not bench.come(MOST_WAITING + 1)


def test_it_can_be_turned_off() -> None:
    bench = Bench(percent=0)
    bench.wave(8)
    assert not bench.come(1)


class Wave(Pipe):
    """A first wave at once; when all of it is answered the next one, a request at each look into the inbox of an engine that has nothing to
    do, and the others during its next step; then `Stop`."""

    def __init__(self, first: list[ToEngine], later: list[ToEngine]) -> None:
        super().__init__(first)
        self.later, self.answered, self.expected = later, 0, len(first) + len(later)
        self.has_answered = False

    def receive(self, timeout: float) -> list[ToEngine]:
        if self.batches:
            return self.batches.popleft()
        if self.answered == self.expected:
            return [Stop()]
        if not self.answered or not (timeout or self.has_answered):
            return []
        self.has_answered = True
        count = 1 if timeout else len(self.later)
        come, self.later = self.later[:count], self.later[count:]
        return come

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, Step)
        self.answered += sum(output.finish == "length" for output in message.each())


class Counting:
    """A runner that takes no time, and says that it took half a second."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps.append((plan.samples, plan.prefill_tokens))
        return StepResult([[7] for _ in range(plan.samples)], seconds=0.5)


@pytest.mark.parametrize(
    ("percent", "length", "steps"),
    [
        pytest.param(100, 100, [(8, 800), (0, 96), (8, 704)], id="it begins with the first, and all end together"),
        pytest.param(100, 4, [(8, 32), (8, 32)], id="too short to begin with"),
        pytest.param(0, 100, [(8, 800), (1, 100), (7, 700)], id="off"),
    ],
)
def test_the_loop_ends_a_wave_in_one_step(percent: int, length: int, steps: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("FRESH_SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(gathering, bound, 60.0)  # the clock is a real one
    bench, runner = Bench(percent), Counting()
    first, later = ([ask(number, length=length) for number in range(begin, begin + 8)] for begin in (100, 200))
    pipe = Wave(first, later)
    assert run_plain(bench.scheduler, runner, pipe, pipe) == 0
    assert runner.steps == steps


def test_what_begins_is_the_first_that_can_be_cut_and_is_finished_whoever_comes() -> None:
    bench = Bench()
    bench.wave(8)
    bench.wave(1, first=7)
    bench.come(1, first=7)
    assert bench.come(1), "the others of the eight"
    plan = bench.scheduler.plan(False, bench.delayer.early_start_tokens)
    assert [(row.request.id, row.count) for row in plan.rows] == [(str(bench.asked), PROMPT - 4)], "of the other one a page is left"
    bench.step(plan)
    assert bench.come(1), "it is held, and the wait goes on"
    assert not bench.scheduler.plan(False, bench.delayer.early_start_tokens)
    bench.now += 0.1 * 9 * STEP_SECONDS
    assert not bench.delayer.seconds()
    plan = bench.scheduler.plan()
    assert (plan.samples, plan.prefill_tokens) == (3, 4 + 4 + PROMPT)
    bench.step(plan)
    assert bench.scheduler.idle and bench.scheduler.held_chunk is None


def test_what_has_begun_may_be_aborted() -> None:
    bench = Bench()
    bench.wave(8)
    assert bench.come(1)
    plan = bench.scheduler.plan(False, bench.delayer.early_start_tokens)
    assert bench.scheduler.abort(plan.rows[0].request.id) is not None
    bench.step(plan)
    assert bench.scheduler.held_chunk is None and not bench.delayer.seconds() and not bench.scheduler.plan()


def test_nobody_begins_where_nobody_is_expected_or_a_page_is_no_step() -> None:
    bench = Bench()
    assert bench.come(1) == LULL
    assert not bench.delayer.early_start_tokens, "it waits for silence alone"
    while plan := bench.scheduler.plan():
        bench.step(plan)
    bench.come(8, max_tokens=40)
    while plan := bench.scheduler.plan():
        bench.step(plan)
    bench.delayer.seconds()
    assert bench.come(1)
    pace, rate = bench.scheduler.stats.step_seconds, bench.scheduler.stats.prefill_rate
    assert bench.delayer.early_start_tokens == int(pace * rate), "what fills a decode step"
    assert bench.scheduler.plan(False, PROMPT - 3).prefill_tokens == 0 < bench.scheduler.plan(False, PROMPT - 4).prefill_tokens


def test_without_chunks_nothing_begins() -> None:
    config = SchedulerConfig(max_model_len=400, chunked_prefill_size=0)
    scheduler = Scheduler(config, PrefixCache(PagePool(5000, 4), 16, extend))
    scheduler.submit(ask(1))
    assert not scheduler.plan(False, 1)
    assert scheduler.plan().samples == 1
