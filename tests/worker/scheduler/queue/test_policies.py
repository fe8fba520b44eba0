"""Priority with preemption, and bounded waiting, with each order. (fcfs and lpm: test_scheduler.py.)"""

import random
from array import array
from contextlib import closing

import pytest
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_common.scheduling_policy import POLICIES
from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.scheduler.config import SchedulerConfig
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
    machine = EngineModel(256, 16, policy="fcfs", max_num_seqs=1)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -3)):
        machine.submit(prompt(20, len(name)), 2, name=name, priority=priority)
    assert admission_order(machine) == ["urgent", "first", "second", "late"]


@pytest.mark.parametrize("scarce", ["pages", "max_num_seqs"])
def test_an_urgent_request_preempts_the_least_urgent_one_which_finishes_later(scarce: str) -> None:
    machine = EngineModel(24 if scarce == "pages" else 256, 4, max_num_seqs=2 if scarce == "max_num_seqs" else 64)
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
    machine = EngineModel(30, 4)
    machine.submit(prompt(80, 1), 8, name="equal", ignore_eos=True, priority=0)
    machine.submit(prompt(8, 2), 8, name="background", ignore_eos=True, priority=7)
    machine.step()
    machine.submit(prompt(60, 4), 8, name="urgent", priority=0)
    machine.step()
    assert {r.id for r in machine.scheduler.running} == {"equal", "background"} and not machine.scheduler.stats.preemptions
    machine.run()
    machine.check_answers()


def test_preemption_is_bounded() -> None:
    machine = EngineModel(256, 4, max_num_seqs=1, max_preemptions=2)
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


def waiting(tenant: str, arrival: int) -> Request:
    return Request(Submit(str(arrival), b"", Sampling(max_tokens=1), 0, tenant=tenant), [], 10, arrival)  # type: ignore[arg-type]  # no tokens needed


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_bounds_how_often_a_request_is_passed(policy: str) -> None:
    machine = EngineModel(256, 16, policy=policy, max_num_seqs=1, max_bypass=5, max_preemptions=0)
    machine.submit(prompt(64), tenant="other")
    machine.run()
    machine.submit(prompt(64, 1), 1, name="disfavoured", tenant="disfavoured")
    passed = 0
    machine.submit([*prompt(64), 0], 1, tenant="other")
    while machine.told["disfavoured"].finish is None:
        machine.submit([*prompt(64), passed + 1], 1, tenant="other")  # a request that the policy prefers always waits
        machine.step()
        passed += 1
        assert passed <= 6
    machine.run()
    machine.check_answers()


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


@pytest.mark.parametrize("policy", POLICIES)
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


def test_pages_that_the_urgent_request_shares_with_a_victim_are_not_taken_twice() -> None:
    """All of the first victim's pages but one are the urgent request's own prefix, and so the second one goes too."""
    machine = EngineModel(pages=16, page_size=4, initial_new_token_ratio=0.0, min_new_token_ratio=0.0)
    for number, length in enumerate((16, 32)):  # of the two, the longer one is preempted last, and the shared prefix is its own
        machine.submit(prompt(length, number), 20, name=str(number), ignore_eos=True, priority=5 + number)
        machine.step()
    shared = machine.submit([*prompt(32, 1)[:28], *prompt(20, 3)], 4, name="urgent")
    machine.step()
    assert machine.scheduler._requests[shared].lease is not None, "what is preempted is enough"
    assert {request.id for request in machine.scheduler.running} == {"urgent"}
    machine.run()
    machine.check_answers()
