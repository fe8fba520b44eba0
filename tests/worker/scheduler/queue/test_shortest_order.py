"""The default order: shortest job first, priority, fair shares and deadlines in one rule, and its bounds."""

import random
from array import array
from contextlib import closing
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.queue.backlog import ClassBacklog
from fairlead_worker.scheduler.queue.waiting_queue import WaitingQueue
from fairlead_worker.scheduler.request import Request

EPSILON = 1e-6


@dataclass
class Queue:
    """A waiting queue without a cache hit, and the clock of each class."""

    max_bypass: int = 100_000
    arrivals: int = 0
    left: dict[int, float] = field(default_factory=dict)
    """Tokens that left each class, divided by the tenants that waited. It starts again when a class is empty."""

    def __post_init__(self) -> None:
        config = SchedulerConfig(max_model_len=100_000, policy="sjf", max_bypass=self.max_bypass)
        self.queue = WaitingQueue(config, PrefixCache(PagePool(8, 16), 16, extend))

    def add(self, length: int, tenant: str = "", priority: int = 0, slack: float = inf) -> Request:
        tokens = array("I", [self.arrivals % 1000] * length)
        sampling = Sampling(max_tokens=1)
        request = Request(str(self.arrivals), tokens, length, sampling, 0, self.arrivals, priority=priority, tenant=tenant, slack=slack)
        self.arrivals += 1
        self.queue.add(request)
        return request

    def admit(self) -> Request:
        with closing(self.queue.candidates()) as candidates:
            chosen = next(candidates)
        group = self.classes[chosen.priority]
        left = self.left.pop(chosen.priority, 0.0) + len(chosen.tokens) / len(group.tenants)
        self.queue.remove_admitted(chosen)
        self.queue.record_prefill(chosen, len(chosen.tokens))
        if chosen.priority in self.classes:
            self.left[chosen.priority] = left
        return chosen

    @property
    def classes(self) -> dict[int, ClassBacklog]:
        return self.queue._backlog.classes

    def clock(self, priority: int) -> float:
        return self.left.get(priority, 0.0)


Arrival = tuple[int, str, int, float]
events = st.lists(
    st.one_of(
        st.none(),
        st.tuples(st.integers(1, 400), st.sampled_from("abc"), st.integers(0, 2), st.one_of(st.just(inf), st.integers(0, 2000))),
    ),
    min_size=1,
    max_size=120,
)
"""Arrivals (tokens, tenant, priority, slack). None admits a request."""


@given(events)
def test_a_request_is_passed_in_its_class_only_by_those_that_arrive_before_its_turn(events: list[Arrival | None]) -> None:
    queue = Queue()
    turns: dict[Request, float] = {}
    """The clock of its class at the turn of each waiting request: its tenant's tokens ahead, and its share of what it delays."""
    arrived: dict[Request, float] = {}
    for event in [*events, *[None] * len(events)]:
        if event is not None:
            length, tenant, priority, slack = event
            group = queue.classes.get(priority)
            ahead = group.tenants[tenant].tokens if group is not None and tenant in group.tenants else 0
            request = queue.add(length, tenant, priority, slack)
            tenants = len(queue.classes[priority].tenants)
            arrived[request] = queue.clock(priority)
            turns[request] = arrived[request] + ahead + length * (tenants - 1) / tenants
        elif len(queue.queue):
            chosen = queue.admit()
            del turns[chosen]
            passed = [other for other in turns if other.arrival < chosen.arrival and other.priority == chosen.priority]
            assert all(arrived[chosen] < turns[other] + EPSILON for other in passed)
            assert not any(other.priority < chosen.priority for other in turns), "a less urgent request never goes first"
    assert not queue.queue.tokens and not queue.classes


@given(st.lists(st.one_of(st.integers(1, 400), st.none()), min_size=1, max_size=120))
def test_with_one_tenant_one_priority_and_no_deadline_the_number_is_left_plus_the_delay_or_the_tokens_ahead(
    turns: list[int | None],
) -> None:
    queue, left, numbers = Queue(), 0, dict[Request, tuple[int, int]]()
    for length in [*turns, *[None] * len(turns)]:
        if length is not None:
            ahead = queue.queue.tokens
            request = queue.add(length)
            numbers[request] = left + min((len(numbers)) * length, ahead), request.arrival
        elif numbers:
            expected = min(numbers, key=lambda request: numbers[request])
            assert queue.admit() is expected
            del numbers[expected]
            left += len(expected.tokens)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 400), st.integers(1, 5))
def test_a_flood_delays_the_first_request_of_another_tenant_by_its_share_only(flood: list[int], length: int, tenants: int) -> None:
    queue = Queue()
    for size in flood:
        for number in range(tenants):
            queue.add(size, f"flood {number}")
    light = queue.add(length, "light")
    passed = 0
    while True:
        for number in range(tenants):
            queue.add(400, f"flood {number}")  # the flood never ends
        chosen = queue.admit()
        if chosen is light:
            break
        passed += len(chosen.tokens)
    assert passed <= (tenants + 1) * (length + max(400, *flood)), "each tenant gets as many tokens, and a request is not cut"


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 400), st.integers(0, 4000))
def test_a_deadline_is_kept_if_what_must_go_before_leaves_the_time(lengths: list[int], length: int, slack: int) -> None:
    """Those that wait go first only if their numbers are lower: no tokens that arrive after the latest start, and no longer ones."""
    queue = Queue()
    others = [queue.add(each) for each in lengths]
    due = queue.add(length, slack=slack + length)
    numbers = queue.queue._order._places
    later = [other for other in others if min(numbers[other].requests * len(other.tokens), numbers[other].ahead) > slack]
    before = []
    while (chosen := queue.admit()) is not due:
        before.append(chosen)
    assert not set(before) & set(later), "a request whose slack runs out goes before one whose turn comes later"


def test_a_request_whose_slack_runs_out_goes_before_one_with_a_lot() -> None:
    queue = Queue()
    for _ in range(3):
        queue.add(100)
    relaxed, soon = queue.add(100, slack=5000), queue.add(100, slack=150)
    order = [queue.admit() for _ in range(5)]
    assert order.index(soon) == 1 and order.index(relaxed) == 4, "50 tokens are left: one request of 100 is before it, by arrival"


def test_a_flood_gets_no_larger_share_by_aborting_requests() -> None:
    queue = Queue()
    for _ in range(300):
        queue.add(200, "flood")
    for _ in range(50):
        queue.queue.remove(queue.add(1000, "flood"))
    light = queue.add(20, "light")
    order = [queue.admit() for _ in range(3)]
    assert light in order, "as without the aborted requests"


def test_two_floods_get_equal_shares_whoever_came_first() -> None:
    queue = Queue()
    for _ in range(100):
        queue.add(20, "first")
    for _ in range(50):
        queue.add(20, "second")
    tenants = [queue.admit().tenant for _ in range(60)]
    assert abs(tenants.count("first") - 30) <= 1


@pytest.mark.parametrize(
    ("urgent", "batch", "passed"),
    [(100, 100, 5), (1000, 100, 3), (1000, 500, 3), (500, 1, 5), (100, 500, 25), (10, 500, 250), (64, 1000, 40)],
)
def test_less_urgent_work_gets_one_turn_in_max_bypass(urgent: int, batch: int, passed: int) -> None:
    """A chunk has 512 tokens."""
    queue = Queue(max_bypass=5)
    queue.add(batch, priority=9)
    queue.add(urgent)
    urgents = 0
    while True:
        queue.add(urgent)
        if queue.admit().priority:
            break
        urgents += 1
    assert passed <= urgents <= passed + 1, "shares are summed in floating point"


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 1000), k=length)


def test_less_urgent_requests_do_not_take_the_pages_that_a_more_urgent_one_waits_for() -> None:
    machine = EngineModel(24, 4)
    machine.submit(prompt(60, 1), 8, ignore_eos=True)
    machine.step()
    machine.submit(prompt(60, 2), 8, name="urgent", ignore_eos=True)
    machine.submit(prompt(8, 3), 8, name="batch", ignore_eos=True, priority=9)
    machine.step()
    assert len(machine.scheduler.running) == 1, "the batch request fits, but the urgent one must not wait for it"
    machine.run()
    machine.check_answers()


def test_an_urgent_request_does_not_wait_for_the_rest_of_a_less_urgent_prompt() -> None:
    machine = EngineModel(256, 4, chunked_prefill_size=32, max_preemptions=1)
    machine.submit(prompt(400, 1), 2, name="batch", ignore_eos=True, priority=9)
    machine.step()
    for turn in range(4):
        name = machine.submit(prompt(20, 2 + turn), 2, ignore_eos=True)
        machine.step()
        machine.check()
        assert machine.told[name].tokens, "it is computed in the next step"
        machine.step()
    batch = machine.scheduler._requests["batch"]
    assert not batch.history.priority_preemptions, "its computed pages stay cached, so it lost nothing"
    machine.run()
    machine.check_answers()
    assert not machine.scheduler.load().preemption_recomputed_tokens


@pytest.mark.parametrize("length", [160, 640])
def test_a_less_urgent_prompt_of_many_chunks_gets_its_share_of_a_flood(length: int) -> None:
    machine = EngineModel(2048, 4, chunked_prefill_size=32, max_bypass=4)
    machine.submit(prompt(length, 1), 1, name="batch", ignore_eos=True, priority=9)
    steps = 0
    while not machine.told["batch"].finish and steps <= 4 * length:
        while len(machine.scheduler.waiting) < 3:
            machine.submit(prompt(32, 1000 + len(machine.told)), 1, ignore_eos=True)
        machine.step()
        steps += 1
    assert steps <= 1.1 * (4 + 1) * length / 32, "one chunk in five is its own, though it is preempted after each"


def test_the_deadline_becomes_tokens_at_the_measured_rate() -> None:
    machine = EngineModel(256, 4, max_num_seqs=1)
    machine.submit(prompt(40, 1), 3, ignore_eos=True, due_in=0.5)
    assert next(iter(machine.scheduler._requests.values())).slack == inf, "no rate is known"
    machine.step()
    rate = machine.scheduler.stats.prefill_rate
    name = machine.submit(prompt(40, 2), 1, due_in=0.5)
    assert machine.scheduler._requests[name].slack == 0.5 * rate
    machine.run()
