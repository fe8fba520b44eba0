"""A tenant leaves a part of the places and pages to others, and its waiting requests do not stand in their way."""

import random
from collections import Counter

import pytest
from tests.worker.scheduler.engine_model import EngineModel
from tests.worker.scheduler.test_cost import calls_of

from fairlead_common.scheduling_policy import POLICIES

every_policy = pytest.mark.parametrize("policy", POLICIES)


def running(machine: EngineModel) -> Counter[str]:
    return Counter(request.submit.tenant for request in machine.scheduler.running)


def flood(machine: EngineModel, count: int, tenant: str, output: int = 100, priority: int = 0) -> None:
    for seed in range(count):
        prompt = random.Random(f"{tenant} {seed}").choices(range(100, 1000), k=8)
        machine.submit(prompt, output, tenant=tenant, ignore_eos=True, priority=priority)


def step(machine: EngineModel, count: int = 1) -> None:
    for _ in range(count):
        machine.step()
        machine.check()


@every_policy
def test_a_flood_leaves_places_that_the_next_tenant_gets_at_once(policy: str) -> None:
    machine = EngineModel(1024, 16, policy=policy, max_num_seqs=16)
    for output in range(10, 110):  # they end one after the other
        flood(machine, 1, "a", output)
    step(machine, 2)
    assert running(machine) == {"a": 14}
    machine.submit([1, 2, 3], 4, tenant="b", name="short")
    step(machine)
    assert running(machine) == {"a": 14, "b": 1}
    flood(machine, 100, "b")
    step(machine, 60)
    assert set(running(machine).values()) <= {7, 8, 9}, "two tenants get equal shares as answers end"


@every_policy
def test_requests_without_a_tenant_get_every_place(policy: str) -> None:
    machine = EngineModel(1024, 16, policy=policy, max_num_seqs=16)
    flood(machine, 100, "")
    step(machine, 2)
    assert running(machine) == {"": 16}


@every_policy
def test_long_outputs_of_a_tenant_leave_pages_that_the_next_one_gets_at_once(policy: str) -> None:
    """The expected output fills the pages long before the places."""
    machine = EngineModel(20 * 17, 4, policy=policy, max_num_seqs=64, initial_new_token_ratio=1.0, min_new_token_ratio=1.0)
    flood(machine, 200, "a", output=60)  # 17 pages each
    waits, most = [], 0
    for number in range(100):
        step(machine)
        most = max(most, running(machine)["a"])
        if number % 5 == 0:
            name = machine.submit([number, 2, 3], 1, tenant="b")
            while not machine.told[name].finish:
                step(machine)
                waits.append(name)
    assert max(Counter(waits).values()) <= 2, "a tenant with short answers waits for no answer of the other"
    assert most == 18


@every_policy
def test_requests_that_lost_their_pages_do_not_hold_up_other_tenants(policy: str) -> None:
    """The expected output is far too low, so decodes run out of pages again and again."""
    machine = EngineModel(64, 4, policy=policy, max_num_seqs=64, initial_new_token_ratio=0.01, min_new_token_ratio=0.01)
    flood(machine, 40, "a", output=100)
    while not any(request.history.lost_pages for request in machine.scheduler.waiting._requests.values()):
        step(machine)
    step(machine, 3)
    longest = 0
    for number in range(20):
        name, waited = machine.submit([number, 2, 3], 1, tenant="b"), 0
        while not machine.told[name].finish:
            step(machine)
            waited += 1
        longest = max(longest, waited)
    assert longest < 100, "the other tenant waits for no more than one answer"
    machine.run()
    machine.check_answers()


def test_an_urgent_request_preempts_less_urgent_ones_of_its_own_tenant() -> None:
    machine = EngineModel(1024, 16, max_num_seqs=16)
    flood(machine, 40, "a", priority=10)
    step(machine, 2)
    flood(machine, 40, "a")
    step(machine, 20)
    assert Counter(request.submit.priority for request in machine.scheduler.running) == {0: 14, 10: 2}
    machine.submit([1, 2, 3], 4, tenant="b", name="short")
    step(machine)
    assert running(machine)["b"] == 1, "the places of less urgent requests count as free"


@every_policy
def test_the_oldest_request_that_is_held_back_stops_nobody(policy: str) -> None:
    """It is due after two others passed it, but its tenant has no place."""
    machine = EngineModel(1024, 16, policy=policy, max_num_seqs=16, max_bypass=2)
    flood(machine, 40, "a")
    step(machine, 2)
    for number in range(8):
        name = machine.submit([number, 2, 3], 1, tenant="b")
        step(machine, 2)
        assert machine.told[name].finish, f"request {number} of the other tenant waits"
    machine.run()
    machine.check_answers()


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_are_held_back_cost_a_step_nothing(policy: str) -> None:
    def calls(count: int) -> int:
        machine = EngineModel(4096, 16, policy=policy, max_num_seqs=16)
        flood(machine, count, "a")
        for _ in range(3):
            machine.step()
        plan = machine.scheduler.plan()
        result = machine._forward(plan)
        machine.scheduler.advance(plan, result)
        return calls_of(machine.scheduler.plan, builtins=True)

    assert calls(1000) <= calls(100) + 20


@pytest.mark.parametrize("policy", POLICIES)
def test_the_order_of_a_tenant_is_kept_while_its_requests_are_held_back(policy: str) -> None:
    machine = EngineModel(1024, 16, policy=policy, max_num_seqs=8, dedupe_tokens=0)
    flood(machine, 60, "a", output=5)
    admitted: list[str] = []
    while not machine.scheduler.idle:
        step(machine)
        admitted += [name for name, _, _ in machine.plans[-1] if name not in admitted]
    assert admitted == list(machine.told)


def outgrow(machine: EngineModel, tenant: str = "a") -> None:
    """Run a flood whose answers are twice as long as their admission expects, until the expected rest needs every page that is left."""
    flood(machine, 40, tenant, output=100)
    for _ in range(500):
        step(machine)
        if machine.scheduler.reserve.pages_to_keep(0, 4) > machine.cache.available:
            return
    raise AssertionError("the answers did not outgrow their reserve")


@every_policy
def test_the_first_request_of_a_tenant_does_not_wait_until_the_answers_of_another_have_room(policy: str) -> None:
    machine = EngineModel(256, 4, policy=policy, max_num_seqs=64, initial_new_token_ratio=0.5, min_new_token_ratio=0.5)
    outgrow(machine)
    waits = []
    for number in range(20):
        name = machine.submit([number, 2, 3], 1, tenant="b")
        waits.append(0)
        while not machine.told[name].finish:
            step(machine)
            waits[-1] += 1
    assert max(waits) <= 2
    machine.run()
    machine.check_answers()


@every_policy
def test_pages_for_the_first_request_of_a_tenant_are_taken_from_the_tenant_that_has_most(policy: str) -> None:
    """The newcomer is the cheapest to compute again, and the one that came last."""
    machine = EngineModel(256, 4, policy=policy, max_num_seqs=64, initial_new_token_ratio=0.5, min_new_token_ratio=0.5)
    outgrow(machine)
    machine.submit([1, 2, 3], 200, tenant="b", name="long", ignore_eos=True)
    step(machine)
    newcomer = machine.scheduler._requests["long"]
    assert newcomer.lease is not None
    before = machine.scheduler.stats.preemptions
    while not machine.told["long"].finish:
        step(machine)
    assert newcomer.history.preemptions == 0 and machine.scheduler.stats.preemptions > before
    machine.run()
    machine.check_answers()


def test_a_less_urgent_first_request_does_not_enter_to_be_preempted() -> None:
    """The tenant with most pages is more urgent here, so nothing would be taken from it."""
    machine = EngineModel(256, 4, max_num_seqs=64, initial_new_token_ratio=0.5, min_new_token_ratio=0.5)
    outgrow(machine)
    names = [machine.submit([number] * 8, 50, tenant=f"tenant {number}", priority=10) for number in range(30)]
    requests = [machine.scheduler._requests[name] for name in names]
    machine.run()
    assert sum(request.history.preemptions for request in requests) <= 8
    machine.check_answers()


def test_tenants_with_one_request_each_leave_the_expected_output_of_all() -> None:
    """Else each one is admitted too early, and all of them are preempted and computed again."""
    machine = EngineModel(256, 4, max_num_seqs=64, initial_new_token_ratio=1.0, min_new_token_ratio=1.0)
    for number in range(40):
        flood(machine, 1, f"tenant {number}", output=100)
    machine.run()
    assert machine.scheduler.stats.preemptions == 0
