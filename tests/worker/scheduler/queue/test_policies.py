"""Shortest job first, priority with preemption, and fair queueing between tenants. (fcfs and lpm: test_scheduler.py.)"""

import random
from array import array
from collections import Counter
from contextlib import closing

import pytest
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.scheduler.config import POLICIES, SchedulerConfig
from fairlead_worker.scheduler.queue.fair_queue import FairOrder
from fairlead_worker.scheduler.queue.waiting_queue import WaitingQueue
from fairlead_worker.scheduler.request import Request


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100, 1000), k=length)


def admission_order(machine: EngineModel) -> list[str]:
    """Run all requests, and return their names in order of admission."""
    seen: list[str] = []
    while not machine.scheduler.idle:
        machine.step()
        machine.check()
        seen += [name for name, _, _ in machine.plans[-1] if name not in seen]
    machine.check_answers()
    return seen


def test_priority_admits_the_most_urgent_first_and_equals_by_arrival() -> None:
    machine = EngineModel(256, 16, policy="sjf", max_num_seqs=1)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -3)):
        machine.submit(prompt(20, len(name)), 2, name=name, priority=priority)
    assert admission_order(machine) == ["urgent", "first", "second", "late"]


@pytest.mark.parametrize("scarce", ["pages", "max_num_seqs"])
def test_an_urgent_request_preempts_the_least_urgent_one_which_finishes_later(scarce: str) -> None:
    machine = EngineModel(24 if scarce == "pages" else 256, 4, policy="sjf", max_num_seqs=2 if scarce == "max_num_seqs" else 64)
    machine.submit(prompt(40, 1), 8, name="equal", ignore_eos=True, priority=1)
    machine.submit(prompt(40, 2), 8, name="background", ignore_eos=True, priority=7)
    machine.step()
    assert len(machine.scheduler.running) == 2
    machine.submit(prompt(40, 3), 8, name="other", ignore_eos=True, priority=7)
    machine.step()
    machine.check()
    assert {r.id for r in machine.scheduler.running} == {"equal", "background"}, "requests of equal priority do not preempt each other"
    machine.submit(prompt(40, 4), 8, name="urgent", ignore_eos=True, priority=1)
    machine.step()
    machine.check()
    assert {r.id for r in machine.scheduler.running} == {"equal", "urgent"}
    machine.run()
    machine.check_answers()
    assert machine.scheduler.load().preemptions == 1
    assert machine.scheduler.load().preemption_recomputed_tokens > 0, "the preempted request is recomputed"


def test_nothing_is_preempted_if_that_does_not_make_room() -> None:
    """The urgent request would not fit even without the background request."""
    machine = EngineModel(30, 4, policy="sjf")
    machine.submit(prompt(80, 1), 8, name="equal", ignore_eos=True, priority=0)
    machine.submit(prompt(8, 2), 8, name="background", ignore_eos=True, priority=7)
    machine.step()
    machine.submit(prompt(60, 4), 8, name="urgent", priority=0)
    machine.step()
    assert {r.id for r in machine.scheduler.running} == {"equal", "background"} and not machine.scheduler.stats.preemptions
    machine.run()
    machine.check_answers()


def test_preemption_is_bounded() -> None:
    machine = EngineModel(256, 4, policy="sjf", max_num_seqs=1, max_preemptions=2)
    machine.submit(prompt(8), 6, name="background", ignore_eos=True, priority=9)
    for turn in range(40):
        machine.step()
        machine.check()
        if machine.told["background"].finish:
            break
        if any(request.id == "background" for request in machine.scheduler.running):
            machine.submit(prompt(8, 1 + turn), 2, priority=0, ignore_eos=True)
    assert machine.told["background"].finish == "length"
    assert machine.scheduler.stats.preemptions == 2
    machine.run()
    machine.check_answers()


def shares(policy: str) -> Counter[str]:
    """Tokens of the first 150 steps: a tenant floods the queue, another comes later with half as many, equal requests."""
    machine = EngineModel(1024, 16, policy=policy, max_num_seqs=4, max_bypass=1000)
    for seed in range(200):
        machine.submit(prompt(20, seed), 10, tenant="flood", ignore_eos=True)
    for seed in range(100):
        machine.submit(prompt(20, 500 + seed), 10, tenant="small", ignore_eos=True)
    for _ in range(150):
        machine.step()
    return Counter(
        {tenant: sum(len(t.tokens) for t in machine.told.values() if t.submit.tenant == tenant) for tenant in ("flood", "small")}
    )


def test_tenants_get_equal_shares_however_many_requests_they_send() -> None:
    fair, fcfs = shares("fair"), shares("fcfs")
    assert fcfs["small"] == 0
    assert abs(fair["small"] - fair["flood"]) <= 60, fair
    assert fair.total() >= 0.95 * fcfs.total(), "fairness must not cost throughput"


def waiting(tenant: str, arrival: int) -> Request:
    return Request(str(arrival), [], 10, Sampling(max_tokens=1), 0, arrival, tenant=tenant)  # type: ignore[arg-type]  # no tokens needed


def test_idling_earns_no_credit_and_memory_is_bounded_for_any_number_of_tenants() -> None:
    order = FairOrder()
    busy = waiting("busy", 0)
    order.add(busy)
    for _ in range(50):
        order.charge_prompt(busy)
    order.add(waiting("back", 1))
    assert order.counter("back") == order.counter("busy") == 500
    for arrival in range(20_000):
        request = waiting(f"t{arrival}", arrival)
        order.add(request)
        order.charge_prompt(request)
        order.remove(request)
    assert len(order._counters) < 10_000 and len(order._heap) < 200


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_bounds_how_often_a_request_is_passed(policy: str) -> None:
    machine = EngineModel(256, 16, policy=policy, max_num_seqs=1, max_bypass=5, max_preemptions=0)
    machine.submit(prompt(64), tenant="other")
    machine.run()
    machine.submit(prompt(64, 1), 1, name="disfavoured", tenant="disfavoured")
    if machine.scheduler.waiting.fair is not None:
        machine.scheduler.waiting.fair._counters["disfavoured"] = 1 << 40
    passed = 0
    machine.submit([*prompt(64), 0], 1, tenant="other")
    while machine.told["disfavoured"].finish is None:
        machine.submit([*prompt(64), passed + 1], 1, tenant="other")  # a request that the policy prefers always waits
        machine.step()
        passed += 1
        assert passed <= 6
    machine.run()
    machine.check_answers()


def test_the_shortest_uncached_prompt_is_next() -> None:
    machine = EngineModel(256, 16, policy="sjf", max_num_seqs=1)
    machine.submit(prompt(64, 1), 1, name="cached", ignore_eos=True)
    machine.run()
    machine.submit(prompt(20, 2), 4, name="busy", ignore_eos=True)
    machine.step()
    for name, tokens in (
        ("long", prompt(100, 3)),
        ("middle", prompt(70, 4)),
        ("hit", [*prompt(64, 1), *prompt(9, 5)]),
        ("short", prompt(20, 6)),
    ):
        machine.submit(tokens, 1, name=name, ignore_eos=True)
    assert admission_order(machine) == ["busy", "long", "hit", "short", "middle"], "`long` waits for none, so it stays first"


def test_a_step_promises_a_bounded_number_of_tokens() -> None:
    machine = EngineModel(256, 16, max_num_seqs=1, promise_tokens=500)
    for number in range(6):
        machine.submit(prompt(400, number), 1)
    machine.step()
    requests = list(machine.scheduler.waiting._requests.values())
    assert [bool(request.promised) for request in requests] == [True, True, False, False, False]
    machine.scheduler.waiting.promise()
    assert [bool(request.promised) for request in requests] == [True, True, True, True, False]
    machine.run()
    machine.check_answers()


def test_a_long_queue_promises_no_more_blocks_than_the_cache_and_one_request_can_hold() -> None:
    machine = EngineModel(64, 16, max_num_seqs=1)
    for number in range(60):
        machine.submit(prompt(320, number), 1)
    while not machine.scheduler.idle:
        machine.step()
        machine.check()
        assert len(set(machine.cache._events.promised)) <= 32 + 10
    machine.check_answers()


@pytest.mark.parametrize("policy", ["sjf", "lpm"])
def test_a_promise_of_a_request_whose_prefix_changed_keeps_it_in_the_order(policy: str) -> None:
    cache = PrefixCache(PagePool(16, 16), 16, extend)
    queue = WaitingQueue(SchedulerConfig(max_model_len=1000, policy=policy, match_refresh_limit=0), cache)
    requests = [waiting("", number) for number in range(2)]
    for request in requests:
        request.tokens = array("I", [request.arrival] * 40)
        queue.add(request)
    match = requests[1].prefix_match
    assert match is not None
    lease = cache.attach(match.root)
    cache.grow(lease, 32)
    cache.publish(lease, requests[1].tokens, 32)  # another request computed the same prompt
    queue.promise()
    assert queue.tokens == 40 + 8
    with closing(queue.candidates()) as candidates:
        assert set(candidates) == set(requests)
