"""Routing policies without the index."""

import asyncio
import random
from array import array
from collections import Counter
from time import monotonic
from typing import get_args

import pytest
from tests.router.harness import Fleet
from tests.router.prompt_format import make_format

from fairlead_common.routing_policy import RoutingPolicy
from fairlead_index.worker_load import WorkerLoad
from fairlead_router.fleet.adapters import Adapter
from fairlead_router.fleet.circuit_breaker import CircuitBreaker
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.chooser import Chooser, Prefixes
from fairlead_router.routing.policies import LeastLoad, RoundRobin, RoutingRequest, Session


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def table() -> WorkerTable:
    table = WorkerTable(Clock())
    table.set_addresses([f"10.0.0.{number}:8000" for number in range(8)])
    for worker in table:
        worker.ready = True
    return table


def choose(table: WorkerTable, hashes: "array[int]") -> Worker | None:
    """Return the choice without an index."""
    choice = Chooser(table, None).choose(RoutingRequest(64 * len(hashes), hashes), (), Prefixes({}, "local"))
    return choice.worker if choice is not None else None


def test_an_unchanged_health_check_does_not_change_the_candidates(table: WorkerTable) -> None:
    worker, told = next(iter(table)), list[str]()
    worker.on_eligibility_change = lambda: told.append("changed")
    worker.ready, worker.draining, worker.silent, worker.role, worker.adapters = True, False, False, "", {}
    assert not told, "the values that every health check sets"
    worker.adapters = {"a": Adapter()}
    worker.silent = True
    worker.mark_unhealthy()
    assert len(told) == 3


async def test_least_load_takes_the_shortest_wait(table: WorkerTable) -> None:
    for number, worker in enumerate(table):
        worker.load = WorkerLoad(backlog_tokens=1000 * (8 - number), prefill_rate=1000.0)
    choice = await LeastLoad(table).choose(RoutingRequest(), ())
    assert choice and choice.worker.address == "10.0.0.7:8000"


async def test_a_burst_spreads_before_any_new_load_report(table: WorkerTable) -> None:
    chosen: Counter[str] = Counter()
    for _ in range(80):
        choice = await LeastLoad(table).choose(RoutingRequest(100), ())
        assert choice
        choice.worker.begin_prompt(100, monotonic())
        chosen[choice.worker.address] += 1
    assert max(chosen.values()) == 10


async def test_short_prompts_between_two_reports_spread_though_their_prefill_is_over(table: WorkerTable) -> None:
    for number, worker in enumerate(table):
        worker.load = WorkerLoad(prefill_rate=20_000.0, running=5, step_seconds=0.010 + 0.0001 * number)
        worker.in_flight = 5
    for _ in range(80):
        choice = await LeastLoad(table).choose(RoutingRequest(64), ())
        assert choice
        choice.worker.in_flight += 1  # its stream runs, and its prompt is computed
    assert [worker.in_flight for worker in table] == [15] * 8


async def test_round_robin_gives_each_worker_the_same_number(table: WorkerTable) -> None:
    policy = RoundRobin(table)
    chosen = Counter([choice.worker.address for _ in range(16) if (choice := await policy.choose(RoutingRequest(), ()))])
    assert set(chosen.values()) == {2}


async def test_a_session_moves_only_when_its_worker_goes(table: WorkerTable) -> None:
    async def where(session: str) -> str:
        choice = await Session(table).choose(RoutingRequest(session=session), ())
        assert choice
        return choice.worker.address

    before = {f"s{number}": await where(f"s{number}") for number in range(200)}
    assert len(set(before.values())) == 8
    lost = "10.0.0.3:8000"
    table.set_addresses([worker.address for worker in table if worker.address != lost])
    for session, address in before.items():
        now = await where(session)
        assert now != lost and (address == lost or now == address)


async def test_without_the_index_a_prefix_stays_on_two_workers_until_others_are_much_sooner(table: WorkerTable) -> None:
    def chosen(hashes: list[int]) -> str:
        worker = choose(table, array("Q", hashes))
        assert worker is not None
        return worker.address

    draw = random.Random(1)
    talk = [draw.getrandbits(64) for _ in range(40)]
    home = chosen(talk)
    assert chosen([*talk, 5]) == home  # the next message of the chat: the key is hashed from the first thousand tokens
    table.get(home).begin_prompt(100_000, monotonic())  # type: ignore[union-attr]
    second = chosen(talk)
    assert second != home
    others = {chosen([draw.getrandbits(64) for _ in range(40)]) for _ in range(40)}
    assert len(others) >= 6 and home not in others
    table.get(second).load = WorkerLoad(backlog_tokens=1_000_000)  # type: ignore[union-attr]
    assert chosen(talk) not in (home, second)


async def test_without_the_index_a_slow_home_attracts_no_more_than_it_saves(table: WorkerTable) -> None:
    hashes = array("Q", [random.Random(1).getrandbits(64)] * 40)
    home = table.home(hashes[0], table.eligible_addresses((), ""))
    for worker in table:
        rate = 1000.0 if worker is home else 10_000.0
        worker.load = WorkerLoad(waiting=10, backlog_tokens=int(4 * rate), prefill_rate=rate)
    assert home is not None and choose(table, hashes) is not home, (
        "32 of 40 blocks are cached there at most, and the others take twice as long as all of them elsewhere"
    )


async def test_tried_draining_silent_and_broken_workers_are_not_chosen(table: WorkerTable) -> None:
    first, second, third, fourth, *others = table
    first.draining, second.silent = True, True
    for _ in range(3):
        third.breaker.record_failure()
    assert set(table.usable({(fourth.address, fourth.generation)})) == set(others)
    assert table.unusable_addresses() == {first.address, second.address, third.address}
    for worker in others:
        worker.ready = False
    assert table.usable({(fourth.address, fourth.generation)}) == [second]  # silent, but better than none


async def test_role_and_adapter_are_hard_filters(table: WorkerTable) -> None:
    first, second, third, *_ = table
    first.role, second.role = "prefill", "both"
    third.adapters = {"tuned": Adapter("d1")}
    assert first not in table.usable() and second in table.usable() and first.address in table.unusable_addresses()
    assert table.usable((), "tuned") == [third] and third.address not in table.unusable_addresses("tuned")
    assert len(table.unusable_addresses("tuned")) == 7


async def test_a_request_for_an_adapter_goes_to_a_worker_that_has_it(fleet: Fleet) -> None:
    plain, tuned = await fleet.worker(), await fleet.worker(load={"adapters": {"tuned": {"digest": "d1"}}})
    router = await fleet.router(plain, tuned)
    for number in range(6):
        answer = await router.client.post("/v1/completions", json={"model": "tuned", "prompt": f"{number} " * 40})
        assert answer.status_code == 200 and answer.headers["x-fairlead-pod"] == tuned.pod
    assert "tuned" in {model["id"] for model in (await router.client.get("/v1/models")).json()["data"]}
    refused = await router.client.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert refused.status_code == 404


@pytest.mark.parametrize("policy", ["PrefixAware", "RoundRobin", "Session"])
async def test_during_a_rollout_that_renames_the_model_each_name_goes_to_workers_that_have_it(fleet: Fleet, policy: str) -> None:
    before, after = await fleet.worker(format=make_format("before")), await fleet.worker(format=make_format("after"))
    router = await fleet.router(before, after, policy=policy, served_model_name="alias")
    names = ["before", "after"] * 6
    asked = (
        router.client.post("/v1/completions", json={"model": name, "prompt": f"{at} " * 40, "user": "u"}) for at, name in enumerate(names)
    )
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert [worker.received[0].json["model"] for worker in (before, after)] == ["before", "after"]
    assert all({one.json["model"] for one in worker.received} == {name} for worker, name in ((before, "before"), (after, "after")))
    answer = await router.client.post("/v1/completions", json={"model": "alias", "prompt": "x"})
    assert answer.status_code == 200, "a name that no format has excludes no worker"


async def test_waiting_for_a_table_change_ends_with_it(table: WorkerTable) -> None:
    waiting = asyncio.create_task(table.wait_for_change(10))
    await asyncio.sleep(0)
    table.set_addresses([])
    await asyncio.wait_for(waiting, 1)


def test_a_circuit_breaker_opens_longer_each_time_and_closes_by_a_health_check() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for seconds in (1, 2, 4, 8, 10, 10):
        while breaker.is_closed:
            breaker.record_failure()
        clock.now += seconds - 0.1
        breaker.record_healthy_check()
        assert not breaker.is_closed
        clock.now += 0.1
        breaker.record_healthy_check()
        assert breaker.is_closed  # half open: one more failure opens it again
    breaker.record_success()
    breaker.record_failure()
    assert breaker.is_closed


async def test_every_policy_serves_requests(fleet: Fleet) -> None:
    workers = [await fleet.worker() for _ in range(2)]
    for policy in get_args(RoutingPolicy):
        router = await fleet.router(*workers, policy=policy)
        answer = await router.complete("x" * 100, user="me")
        assert answer.status_code == 200 and ("x-fairlead-predicted-tokens" in answer.headers) == (policy == "PrefixAware")
