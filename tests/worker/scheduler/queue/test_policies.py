"""Priority with preemption, and fair queueing between tenants. (fcfs and lpm: test_scheduler.py.)"""

import random
from collections import Counter

import pytest
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.scheduler.config import POLICIES
from fairlead_worker.scheduler.queue.fair_queue import FairOrder
from fairlead_worker.scheduler.request import Request


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100, 1000), k=length)


def first_seen(machine: EngineModel) -> list[str]:
    seen: list[str] = []
    while not machine.scheduler.idle:
        machine.step()
        machine.check()
        seen += [name for name, _, _ in machine.plans[-1] if name not in seen]
    machine.check_answers()
    return seen


def test_priority_admits_the_most_urgent_first_and_equals_by_arrival() -> None:
    machine = EngineModel(256, 16, policy="priority", max_num_seqs=1)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -3)):
        machine.submit(prompt(20, len(name)), 2, name=name, priority=priority)
    assert first_seen(machine) == ["urgent", "first", "second", "late"]


@pytest.mark.parametrize("scarce", ["pages", "seats"])
def test_the_urgent_take_the_place_of_the_least_urgent_and_these_finish(scarce: str) -> None:
    machine = EngineModel(24 if scarce == "pages" else 256, 4, policy="priority", max_num_seqs=2 if scarce == "seats" else 64)
    machine.submit(prompt(40, 1), 8, name="equal", ignore_eos=True, priority=1)
    machine.submit(prompt(40, 2), 8, name="meek", ignore_eos=True, priority=7)
    machine.step()
    assert len(machine.scheduler.running) == 2
    machine.submit(prompt(40, 3), 8, name="other", ignore_eos=True, priority=7)
    machine.step()
    machine.check()
    assert {r.id for r in machine.scheduler.running} == {"equal", "meek"}, "equals do not take each other's place"
    machine.submit(prompt(40, 4), 8, name="urgent", ignore_eos=True, priority=1)
    machine.step()
    machine.check()
    assert {r.id for r in machine.scheduler.running} == {"equal", "urgent"}
    machine.run()
    machine.check_answers()
    assert machine.scheduler.load().preemptions == 1
    assert machine.scheduler.load().preemption_recomputed_tokens > 0, "its pages were taken, and what it computed is computed again"


def test_nobody_is_preempted_for_nothing() -> None:
    """Two meek ones and a dear one: the urgent one would not fit even if the meek ones went."""
    machine = EngineModel(30, 4, policy="priority")
    machine.submit(prompt(80, 1), 8, name="equal", ignore_eos=True, priority=0)
    machine.submit(prompt(8, 2), 8, name="meek", ignore_eos=True, priority=7)
    machine.step()
    machine.submit(prompt(60, 4), 8, name="urgent", priority=0)
    machine.step()
    assert {r.id for r in machine.scheduler.running} == {"equal", "meek"} and not machine.scheduler.stats.preemptions
    machine.run()
    machine.check_answers()


def test_preemption_is_bounded() -> None:
    machine = EngineModel(256, 4, policy="priority", max_num_seqs=1, max_preemptions=2)
    machine.submit(prompt(8), 6, name="meek", ignore_eos=True, priority=9)
    for turn in range(40):
        machine.step()
        machine.check()
        if machine.told["meek"].finish:
            break
        if any(request.id == "meek" for request in machine.scheduler.running):
            machine.submit(prompt(8, 1 + turn), 2, priority=0, ignore_eos=True)
    assert machine.told["meek"].finish == "length"
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


def test_tenants_share_alike_however_many_requests_they_send() -> None:
    fair, fcfs = shares("fair"), shares("fcfs")
    assert fcfs["small"] == 0
    assert abs(fair["small"] - fair["flood"]) <= 60, fair
    assert fair.total() >= 0.95 * fcfs.total(), "and nothing is lost by it"


def waiting(tenant: str, arrival: int) -> Request:
    return Request(str(arrival), [], 10, Sampling(max_tokens=1), 0, arrival, tenant=tenant)  # type: ignore[arg-type]  # no tokens needed


def test_silence_saves_nothing_up_and_tenants_without_number_take_no_memory() -> None:
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
def test_nobody_is_passed_for_ever(policy: str) -> None:
    machine = EngineModel(256, 16, policy=policy, max_num_seqs=1, max_bypass=5, max_preemptions=0)
    machine.submit(prompt(64), tenant="other")
    machine.run()
    machine.submit(prompt(64, 1), 1, name="unloved", priority=9, tenant="unloved")
    if machine.scheduler.waiting.fair is not None:
        machine.scheduler.waiting.fair._counters["unloved"] = 1 << 40
    passed = 0
    machine.submit([*prompt(64), 0], 1, tenant="other")
    while machine.told["unloved"].finish is None:
        machine.submit([*prompt(64), passed + 1], 1, tenant="other")  # a request that the policy prefers always waits
        machine.step()
        passed += 1
        assert passed <= 6
    machine.run()
    machine.check_answers()
