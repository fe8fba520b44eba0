"""The index lists only some of the serving workers: all of them still share the load, in every index mode."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.redis_server import RedisServer
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.stand_in_worker import Exchange, answers, answers_when_all_have_come

from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.reader import IndexReader
from fairlead_router.routing.prefix_aware import PrefixAware

NAMESPACE = "tests/unnamed"
ROOM = {"backlog_tokens": 0, "pages_free": 100_000, "pages_total": 100_000, "page_size": 16}
REQUESTS = 96


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def partly_named(fleet: Fleet, redis: RedisServer, named: int, unnamed: int, mode: str) -> RunningRouter:
    """A router whose discovery knows all workers, and its index the first of them."""
    index = (redis.url, NAMESPACE)
    workers = [await fleet.worker(redis=index if n < named else None, load=ROOM, lease=60.0) for n in range(named + unnamed)]
    await eventually(lambda: all(worker.joined for worker in workers[:named]), "they joined the index")
    await asyncio.gather(*(reported(redis, worker.address) for worker in workers[:named]))
    for worker in workers:
        worker.reports = False  # what the index says of them changes by reservations alone
    router = await fleet.router(*workers, redis_url=redis.url, index_namespace=NAMESPACE, index_mode=mode)
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware)
    await eventually(lambda: policy.read_mode == ("mirror" if mode == "mirror" else "remote"), "the index is read as wanted")
    return router


async def reported(redis: RedisServer, address: str) -> None:
    reader = IndexReader(redis.url, NAMESPACE, deadline=1)

    async def there() -> bool:
        return any(state.address == address and state.load.pages_total for state in await reader.workers())

    try:
        await eventually(there, "its load is in the index")
    finally:
        await reader.close()


async def nothing_reserved(redis: RedisServer) -> bool:
    reader = IndexReader(redis.url, NAMESPACE, deadline=1)
    try:
        return not any(state.reserved_tokens for state in await reader.workers())
    finally:
        await reader.close()


async def burst(fleet: Fleet, router: RunningRouter) -> Counter[str]:
    """Requests by pod, each of a prompt of its own; none is answered before all have arrived."""
    together = answers_when_all_have_come(REQUESTS)
    for worker in fleet.workers:
        worker.behaviour = together
    done = await asyncio.gather(*(router.complete(f"{number} asks something else " * 20) for number in range(REQUESTS)))
    assert {answer.status_code for answer in done} == {200}
    return Counter(answer.headers["x-fairlead-pod"] for answer in done)


@pytest.mark.parametrize("mode", ["remote", "mirror", "auto"])
async def test_the_few_that_joined_again_are_not_flooded(
    fleet: Fleet, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("fairlead_router.routing.prefix_aware.AUTO_BLOCKS", 1)  # `auto` asks Redis, as of a large fleet
    router = await partly_named(fleet, redis, 2, 6, mode)
    taken = await burst(fleet, router)
    assert len(taken) == 8 and max(taken.values()) <= 1.5 * REQUESTS / 8, taken
    await eventually(lambda: nothing_reserved(redis), "every reservation ended")


@pytest.mark.parametrize("mode", ["remote", "auto"])
async def test_nor_are_many_of_a_larger_fleet(fleet: Fleet, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr("fairlead_router.routing.prefix_aware.AUTO_BLOCKS", 1)
    router = await partly_named(fleet, redis, 9, 9, mode)  # more than an answer of the index names
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware) and policy._unindexed is not None
    unnamed = policy._unindexed

    async def counted() -> bool:
        await router.complete("one more " * 20)
        return len(unnamed._missing) == 9

    await eventually(counted, "the unindexed workers are known")
    taken = await burst(fleet, router)
    assert len(taken) == 18 and max(taken.values()) <= 2 * REQUESTS / 18, taken


async def test_what_was_reserved_for_a_worker_that_is_not_used_is_given_back_at_once(fleet: Fleet, redis: RedisServer) -> None:
    """... while the request is under way elsewhere: nothing else gives it back, for the worker reports no loads."""
    busy = ROOM | {"backlog_tokens": 50_000, "prefill_rate": 100.0}
    named = await fleet.worker(redis=(redis.url, NAMESPACE), load=busy, lease=60.0)
    unnamed = await fleet.worker(load=ROOM)
    await eventually(lambda: named.joined, "it joined the index")
    await reported(redis, named.address)
    named.reports = False
    router = await fleet.router(named, unnamed, redis_url=redis.url, index_namespace=NAMESPACE, index_mode="remote")
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        asked.set()
        await go_on.wait()
        await answers(exchange)

    unnamed.behaviour = waits
    asking = asyncio.create_task(router.complete("prompt " * 100))
    await asyncio.wait_for(asked.wait(), 10)
    await eventually(lambda: nothing_reserved(redis), "the reservation was given back", 5)
    go_on.set()
    answer = await asking
    assert answer.headers["x-fairlead-pod"] == unnamed.pod and "x-fairlead-predicted-tokens" not in answer.headers
    assert not named.received


async def test_a_conversation_stays_with_its_holder_beside_idle_workers_that_are_not_named(fleet: Fleet, redis: RedisServer) -> None:
    router = await partly_named(fleet, redis, 2, 4, "remote")
    first = (await router.complete("what was said " * 40)).headers["x-fairlead-pod"]
    reader = IndexReader(redis.url, NAMESPACE, deadline=1)
    holder = next(worker for worker in fleet.workers if worker.pod == first)
    assert holder.joined, "of equals the index's own best is taken"
    hashes = block_hashes(prompt_root(holder.format), holder.received[-1].tokens or [], holder.format.block_tokens)

    async def known() -> bool:
        return bool(await reader.match(hashes))

    await eventually(known, "the index knows its blocks")
    await reader.close()
    for turn in range(5):
        assert (await router.complete("what was said " * 40 + f"and turn {turn}")).headers["x-fairlead-pod"] == first
