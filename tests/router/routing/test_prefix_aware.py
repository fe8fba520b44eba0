"""PrefixAware with a real Redis and workers that write to it."""

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.stand_in_worker import StandIn, answers, answers_when_all_have_come, dies_at_once
from tests.servers.redis_server import RedisServer

from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.reader import IndexReader
from fairlead_operator.polling.prober import Prober
from fairlead_operator.status import index as index_status
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.prefix_aware import PrefixAware


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def namespace() -> str:
    return f"tests/{uuid.uuid4().hex[:8]}"


@pytest.fixture(params=["remote", "mirror"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def start_fleet(
    fleet: Fleet, redis: RedisServer, namespace: str, count: int, mode: str = "auto", **settings: Any
) -> tuple[RunningRouter, list[StandIn]]:
    workers = [await fleet.worker(redis=(redis.url, namespace)) for _ in range(count)]
    router = await fleet.router(
        *workers, workers=fleet.list_in_file(*workers), redis_url=redis.url, index_namespace=namespace, index_mode=mode, **settings
    )
    await eventually(lambda: all(worker.joined for worker in workers), "the workers joined the index")
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware)
    await eventually(lambda: policy.read_mode == ("remote" if mode == "remote" else "mirror"), "the index is read as wanted", 5)
    return router, workers


async def indexed(redis: RedisServer, namespace: str, worker: StandIn, router: RunningRouter | None = None) -> None:
    """Wait until the index, and the router's mirror if any, know that the worker holds its last prompt."""
    reader = IndexReader(redis.url, namespace, deadline=1)
    hashes = block_hashes(prompt_root(worker.format), worker.received[-1].tokens, 16)

    policy = router.server.router.policy if router is not None else None
    mirrored = policy.lookup if isinstance(policy, PrefixAware) else None

    async def holds() -> bool:
        if (
            mirrored is not None
            and mirrored.has_copy
            and mirrored.find_in_copy(RoutingRequest(16 * len(hashes), hashes)).held.get(worker.address) != 16 * len(hashes)
        ):
            return False
        return (await reader.match(hashes)).get(worker.address, 0) == 16 * len(hashes)

    try:
        await eventually(holds, "the index knows the blocks")
    finally:
        await reader.close()


def holder(workers: list[StandIn], pod: str) -> StandIn:
    return next(worker for worker in workers if worker.pod == pod)


async def test_a_conversation_returns_to_the_worker_that_holds_it(fleet: Fleet, redis: RedisServer, namespace: str, mode: str) -> None:
    router, workers = await start_fleet(fleet, redis, namespace, 3, mode)
    for talk in ("alpha ", "beta ", "gamma "):
        prompt, home, before = talk * 60, "", 0
        for _ in range(4):
            answer = await router.complete(prompt)
            if home:
                assert answer.headers["x-fairlead-pod"] == home
                assert answer.headers["x-fairlead-predicted-tokens"] == answer.headers["x-fairlead-cached-tokens"] == str(before)
            home = answer.headers["x-fairlead-pod"]
            before = len(prompt) // 16 * 16
            await indexed(redis, namespace, holder(workers, home), router)
            prompt += "and what it said, and the next turn of it "
    assert await router.metric("fairlead_router_prediction_error_tokens_sum") == 0
    assert await router.metric("fairlead_router_predicted_cached_tokens_total") > 3000


async def test_a_dead_holder_is_not_tried_again_while_its_lease_still_runs(
    fleet: Fleet, redis: RedisServer, namespace: str, mode: str
) -> None:
    router, workers = await start_fleet(fleet, redis, namespace, 2, mode)
    prompt = "prefix " * 50
    first = holder(workers, (await router.complete(prompt)).headers["x-fairlead-pod"])
    await indexed(redis, namespace, first, router)
    first._index = None  # it dies without telling the index
    await first.kill()
    answers = await asyncio.gather(*(router.complete(prompt + str(number)) for number in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-fairlead-pod"] for answer in answers} == {worker.pod for worker in workers if worker is not first}


async def test_a_holder_that_is_not_ready_is_not_chosen(fleet: Fleet, redis: RedisServer, namespace: str, mode: str) -> None:
    router, workers = await start_fleet(fleet, redis, namespace, 2, mode)
    prompt = "prefix " * 50
    first = holder(workers, (await router.complete(prompt)).headers["x-fairlead-pod"])
    await indexed(redis, namespace, first, router)
    first.ready = False
    await router.usable(1)
    assert (await router.complete(prompt)).headers["x-fairlead-pod"] != first.pod


async def test_a_worker_that_restarts_on_another_address_under_load_fails_no_request(
    fleet: Fleet, redis: RedisServer, namespace: str, mode: str
) -> None:
    router, workers = await start_fleet(fleet, redis, namespace, 2, mode)
    failures, done, stop = [], 0, False

    async def client(name: int) -> None:
        nonlocal done
        turn = 0
        while not stop:
            answer = await router.complete(f"{turn} of client {name} " * (10 + turn % 20))
            turn += 1
            done += 1
            if answer.status_code != 200:
                failures.append(answer.text)

    clients = [asyncio.create_task(client(number)) for number in range(8)]
    await eventually(lambda: done > 50, "load runs")
    await workers[0].kill()
    await eventually(lambda: done > 150, "load goes on")
    again = await fleet.worker(redis=(redis.url, namespace))
    fleet.list_in_file(workers[1], again)
    await eventually(lambda: len(again.received) > 20, "the new one gets its share")
    stop = True
    await asyncio.gather(*clients)
    assert not failures


async def test_killing_redis_fails_no_request_and_prefix_routing_returns_with_it(
    fleet: Fleet, redis: RedisServer, namespace: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    router, _ = await start_fleet(fleet, redis, namespace, 2, mode)
    caplog.set_level("INFO", "fairlead_router.routing.prefix_aware")

    async def burst() -> list[int]:
        return [answer.status_code for answer in await asyncio.gather(*(router.complete(f"{number} " * 60) for number in range(30)))]

    assert await burst() == [200] * 30
    redis.kill()
    assert await burst() == [200] * 30

    async def noticed() -> bool:
        return await router.metric("fairlead_router_index_up") == 0

    await eventually(noticed, "a copy notices by itself")
    assert await burst() == [200] * 30
    assert await router.metric("fairlead_router_index_unavailable_total") >= 30
    answer = await router.complete("x" * 50)
    assert answer.status_code == 200 and answer.headers["x-fairlead-predicted-tokens"] == "0"
    picture = (await router.client.get("/fairlead/workers")).json()
    assert picture["index"] == "unavailable" and picture["index_reason"]
    assert (await router.client.get("/ready")).status_code == 200
    redis.start()

    async def prefix_is_routed() -> bool:
        start_fleet = "x-fairlead-predicted-tokens" in (await router.complete("y" * 50)).headers
        return start_fleet and bool((await router.client.get("/fairlead/workers")).json()["index"] == "ok")

    await eventually(prefix_is_routed, "prefix routing is back", 15)
    assert (await router.client.get("/fairlead/workers")).json()["index_reason"] == ""

    def told() -> bool:
        levels = [record.levelname for record in caplog.records if record.name == "fairlead_router.routing.prefix_aware"]
        return levels[:2] == ["WARNING", "INFO"]

    await eventually(told, "the log says that the index answers again")


async def test_an_idle_router_reports_whether_the_index_answers(fleet: Fleet, redis: RedisServer, namespace: str, mode: str) -> None:
    router, _ = await start_fleet(fleet, redis, namespace, 1, mode)

    async def says(index: str, up: int) -> bool:
        picture = (await router.client.get("/fairlead/workers")).json()
        return picture["index"] == index and bool(picture["index_reason"]) != up and await router.metric("fairlead_router_index_up") == up

    await eventually(lambda: says("ok", 1), "it answers")
    redis.kill()
    await eventually(lambda: says("unavailable", 0), "it is away", 15)
    redis.start()
    await eventually(lambda: says("ok", 1), "it is back", 15)


async def test_a_mirror_routes_by_its_last_state_while_redis_is_down(fleet: Fleet, redis: RedisServer, namespace: str) -> None:
    router, workers = await start_fleet(fleet, redis, namespace, 4, "mirror")
    talks = [f"{name} and what was said " * 20 for name in ("ann", "bob", "eve", "joe", "kim", "lee")]
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware) and policy.lookup is not None
    find, homes = policy.lookup.find_in_copy, []
    for talk in talks:
        homes.append((await router.complete(talk)).headers["x-fairlead-pod"])
        home = holder(workers, homes[-1])
        wanted = RoutingRequest(len(talk), block_hashes(prompt_root(home.format), home.received[-1].tokens or [], 16))
        await eventually(lambda: find(wanted).held.get(home.address) == len(talk) // 16 * 16, "it is mirrored")  # noqa: B023 (awaited here)
    redis.kill()
    await eventually(lambda: policy.index == "unavailable", "its absence is noticed", 5)
    answers = [await router.complete(talk + "and the next turn") for talk in talks]
    assert [answer.headers["x-fairlead-pod"] for answer in answers] == homes
    assert all(int(answer.headers["x-fairlead-predicted-tokens"]) > 400 for answer in answers)
    new = [await router.complete("a talk that began meanwhile " * turns) for turns in (20, 21, 22)]
    assert len({answer.headers["x-fairlead-pod"] for answer in new}) == 1 and int(new[2].headers["x-fairlead-predicted-tokens"]) > 500
    assert int(new[0].headers.get("x-fairlead-predicted-tokens", 0)) == 0, "what is only expected at a home is not predicted"
    workers[0].ready = False  # the router's own health check
    await router.usable(3)
    answers = [await router.complete(talk + "and one more") for talk in talks]
    assert workers[0].pod not in {answer.headers["x-fairlead-pod"] for answer in answers}


async def test_auto_reads_redis_directly_where_the_fleet_is_large(
    fleet: Fleet, redis: RedisServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"pages_total": 1000, "pages_free": 1000, "page_size": 16}
    workers = [await fleet.worker(redis=(redis.url, namespace), load=pages) for _ in range(2)]
    reader = IndexReader(redis.url, namespace, deadline=1)

    async def told() -> bool:
        return [state.load.pages_total for state in await reader.workers()] == [1000, 1000]

    await eventually(told, "their sizes are in the index")
    await reader.close()
    monkeypatch.setattr("fairlead_router.routing.prefix_lookup.AUTO_BLOCKS", 1999)
    router = await fleet.router(*workers, redis_url=redis.url, index_namespace=namespace)
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware) and policy._fleet is not None
    fleet_reader = policy._fleet
    await eventually(lambda: fleet_reader.capacity == 2000, "the fleet is seen")
    answer = await router.complete("prefix " * 50)
    assert policy.read_mode == "remote" and "x-fairlead-predicted-tokens" in answer.headers


async def test_a_router_routes_exactly_within_a_second_of_its_start(fleet: Fleet, redis: RedisServer, namespace: str, mode: str) -> None:
    first, workers = await start_fleet(fleet, redis, namespace, 2, mode)
    prompt = "prefix " * 50
    home = holder(workers, (await first.complete(prompt)).headers["x-fairlead-pod"])
    await indexed(redis, namespace, home)
    second = await fleet.router(*workers, redis_url=redis.url, index_namespace=namespace, index_mode=mode)
    answer = await second.complete(prompt)  # ready or not, its first answer
    assert answer.headers["x-fairlead-pod"] == home.pod and answer.headers["x-fairlead-predicted-tokens"] == str(len(prompt) // 16 * 16)


async def test_equal_cold_prompts_that_arrive_together_go_to_one_worker(
    fleet: Fleet, redis: RedisServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index knows a block only when it is computed. One text for each worker: so the order of loads and answers decides nothing."""
    monkeypatch.setattr("fairlead_router.routing.chooser.ALONE_SECONDS", -1.0)
    router, workers = await start_fleet(fleet, redis, namespace, 2, "mirror")
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware)
    together = answers_when_all_have_come(8)
    texts = [f"text {number}: " + "some words of a long text " * 40 for number in range(2)]
    for worker in workers:
        worker.behaviour = together
    done = await asyncio.gather(*(router.complete(f"{texts[number % 2]} question {number}", stream=True) for number in range(8)))
    assert {answer.status_code for answer in done} == {200}
    pods = [{done[number].headers["x-fairlead-pod"] for number in range(text, 8, 2)} for text in range(2)]
    assert all(len(each) == 1 for each in pods), pods
    predicted = [int(answer.headers["x-fairlead-predicted-tokens"]) for answer in done]
    assert sum(tokens == 0 for tokens in predicted) == 2 and sum(tokens >= len(texts[0]) // 16 * 16 for tokens in predicted) == 6
    assert not policy._chooser._in_flight._requests, "nothing is in flight after the answers"


async def test_a_prompt_whose_request_failed_is_not_expected_at_its_worker(fleet: Fleet, redis: RedisServer, namespace: str) -> None:
    router, workers = await start_fleet(fleet, redis, namespace, 2, "mirror")
    for worker in workers:
        worker.behaviour, worker.tells = dies_at_once, False
    assert (await router.complete("prefix " * 50)).status_code == 502
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware) and not policy._chooser._in_flight._requests
    for worker in workers:
        worker.behaviour = answers
    await router.usable(2)
    assert (await router.complete("prefix " * 50)).headers["x-fairlead-predicted-tokens"] == "0"


async def test_reservations_end_with_the_first_byte_and_with_failure(fleet: Fleet, redis: RedisServer, namespace: str, mode: str) -> None:
    router, workers = await start_fleet(fleet, redis, namespace, 2, mode)
    await router.complete("a " * 100)
    await workers[0].kill()
    await asyncio.gather(*(router.complete(f"{number} " * 100) for number in range(10)))
    reader = IndexReader(redis.url, namespace, deadline=1)

    async def nothing_reserved() -> bool:
        return not any(state.reserved_tokens for state in await reader.workers())

    try:
        await eventually(nothing_reserved, "reservations are given back", 5)
    finally:
        await reader.close()


async def test_a_dead_worker_that_only_the_index_knows_is_tried_once(fleet: Fleet, redis: RedisServer, namespace: str, mode: str) -> None:
    router, (known,) = await start_fleet(fleet, redis, namespace, 1, mode)
    newer = await fleet.worker(redis=(redis.url, namespace), load={"prefill_rate": 1e6})
    await eventually(lambda: newer.joined, "it joined the index")
    writer, newer._index = newer._index, None  # it dies without telling the index, and its lease outlasts the test
    await newer.kill()
    try:
        answers = [await router.complete(f"{number} " * 50) for number in range(12)]
    finally:
        await writer.leave()
    assert {answer.status_code for answer in answers} == {200} and len(known.received) == 12
    assert await router.metric("fairlead_router_retries_total") <= 1


@pytest.mark.parametrize("setting", ["remote", "mirror", "auto"])
async def test_a_missing_secret_is_in_the_status_after_the_operators_probe(
    fleet: Fleet, redis: RedisServer, namespace: str, setting: str
) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, redis_url=redis.url, redis_credentials="/nowhere", index_namespace=namespace, index_mode=setting)
    assert (await router.complete("Ready?")).status_code == 200
    prober = Prober("cluster.local", base_url=str(router.client.base_url).rstrip("/"))
    seen = index_status.parse_router_page(await prober.fetch_workers(""))
    await prober.close()
    assert (seen.state, seen.read) == ("Unavailable", "Remote") and "does the Secret exist in this namespace?" in seen.reason
