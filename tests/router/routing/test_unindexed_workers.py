"""The index lists only some of the serving workers: all of them still share the load, in every index mode."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.stand_in_worker import answers_when_all_have_come
from tests.servers.redis_server import RedisServer

from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.reader import IndexReader
from fairlead_router.routing.prefix_aware import PrefixAware

NAMESPACE = "tests/unindexed"
ROOM = {"backlog_tokens": 0, "pages_free": 100_000, "pages_total": 100_000, "page_size": 16}
REQUESTS = 96


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def partly_indexed(fleet: Fleet, redis: RedisServer, indexed: int, unindexed: int, mode: str) -> RunningRouter:
    """Start a router whose discovery knows all workers while its index knows only the first `indexed`."""
    index = (redis.url, NAMESPACE)
    workers = [await fleet.worker(redis=index if n < indexed else None, load=ROOM, lease=60.0) for n in range(indexed + unindexed)]
    await eventually(lambda: all(worker.joined for worker in workers[:indexed]), "they joined the index")
    await asyncio.gather(*(load_reported(redis, worker.address) for worker in workers[:indexed]))
    for worker in workers:
        worker.reports = False  # their load in the index then changes by reservations alone
    router = await fleet.router(*workers, redis_url=redis.url, index_namespace=NAMESPACE, index_mode=mode)
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware)
    await eventually(lambda: policy.read_mode == ("mirror" if mode == "mirror" else "remote"), "the index is read as wanted")
    return router


async def load_reported(redis: RedisServer, address: str) -> None:
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
    """Count requests by pod, each with its own prompt; none is answered before all have arrived."""
    together = answers_when_all_have_come(REQUESTS)
    for worker in fleet.workers:
        worker.behaviour = together
    done = await asyncio.gather(*(router.complete(f"{number} asks something else " * 20) for number in range(REQUESTS)))
    assert {answer.status_code for answer in done} == {200}
    return Counter(answer.headers["x-fairlead-pod"] for answer in done)


@pytest.mark.parametrize("mode", ["remote", "mirror", "auto"])
async def test_a_few_workers_that_joined_again_are_not_flooded(
    fleet: Fleet, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("fairlead_router.routing.prefix_lookup.AUTO_BLOCKS", 1)  # `auto` reads Redis, as for a large fleet
    router = await partly_indexed(fleet, redis, 2, 6, mode)
    taken = await burst(fleet, router)
    assert len(taken) == 8 and max(taken.values()) <= 1.5 * REQUESTS / 8, taken
    # If a reply is lost with its connection, the reservation expires after a minute: these workers report no loads.
    await eventually(lambda: nothing_reserved(redis), "every reservation ended", 90.0)


@pytest.mark.parametrize("mode", ["remote", "auto"])
async def test_the_indexed_workers_of_a_larger_fleet_are_not_flooded(
    fleet: Fleet, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("fairlead_router.routing.prefix_lookup.AUTO_BLOCKS", 1)
    router = await partly_indexed(fleet, redis, 9, 9, mode)  # more than are all scored
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware) and policy._fleet is not None
    fleet_reader = policy._fleet
    await eventually(lambda: len(fleet_reader.workers) == 9, "the loads of the indexed workers are known")
    taken = await burst(fleet, router)
    assert len(taken) == 18 and max(taken.values()) <= 2 * REQUESTS / 18, taken


async def test_a_conversation_stays_with_its_holder_beside_idle_unindexed_workers(fleet: Fleet, redis: RedisServer) -> None:
    router = await partly_indexed(fleet, redis, 2, 4, "remote")
    for number in range(100):
        talk = f"{number} was what was said " * 40
        first = (await router.complete(talk)).headers["x-fairlead-pod"]
        holder = next(worker for worker in fleet.workers if worker.pod == first)
        if holder.joined:
            break
    reader = IndexReader(redis.url, NAMESPACE, deadline=1)
    hashes = block_hashes(prompt_root(holder.format), holder.received[-1].tokens or [], holder.format.block_tokens)

    async def known() -> bool:
        return bool(await reader.match(hashes))

    await eventually(known, "the index knows its blocks")
    await reader.close()
    for turn in range(5):
        assert (await router.complete(talk + f"and turn {turn}")).headers["x-fairlead-pod"] == first
