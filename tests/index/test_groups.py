"""One service over several index groups: the same answers as over one, reservations that add up, and a group that is unreachable."""

import asyncio
from collections import Counter

import pytest
from tests.index.conftest import either, eventually
from tests.servers.redis_cluster import RedisCluster
from tests.servers.redis_server import VERSIONS, RedisServer, binary, free_port

from fairlead_index.groups import GroupedReader, create_reader, group_namespaces, namespace_of
from fairlead_index.hashing import block_hashes
from fairlead_index.reader import IndexReader, IndexUnavailable
from fairlead_index.redis.scripts import SCHEMA
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter

BLOCK, GROUPS = 4, 3
CHAIN = block_hashes(7, range(64 * BLOCK), BLOCK)
PODS = [f"p{n}" for n in (0, 1, 2, 3, 4, 5, 6, 7, 13)]  # three for each group


async def start(url: str, namespace: str) -> tuple[dict[str, IndexWriter], GroupedReader]:
    writers = {}
    for pod in PODS:
        writers[pod] = IndexWriter(url, namespace_of(namespace, pod, GROUPS), WorkerCard(pod, f"{pod}:1", BLOCK), 2.0, call_seconds=2.0)
        writers[pod].start()
    reader = GroupedReader([IndexReader(url, each, deadline=2.0) for each in group_namespaces(namespace, GROUPS)])

    async def joined() -> bool:
        return {worker.pod for worker in await reader.workers()} == set(PODS)

    await eventually(joined)
    return writers, reader


async def end(writers: dict[str, IndexWriter], *readers: GroupedReader) -> None:
    await asyncio.gather(*(writer.leave() for writer in writers.values()), *(reader.close() for reader in readers))


def test_pods_spread_evenly_over_groups_and_the_assignment_never_changes() -> None:
    assert namespace_of("a/b", "pod", 1) == "a/b" == group_namespaces("a/b", 1)[0]
    filled = Counter(namespace_of("a/b", f"svc-worker-5d9f8-{n:x}", 4) for n in range(400))
    assert set(filled) == set(group_namespaces("a/b", 4)) and max(filled.values()) < 140
    assert namespace_of("a/b", "pod-0", 8) == "a/b:g6"  # a change here would send pods and routers of two releases to different groups


@either
async def test_answers_equal_those_of_a_single_index(server: RedisServer, namespace: str) -> None:
    writers, reader = await start(server.url, namespace)
    for at, pod in enumerate(PODS):
        writers[pod].store(CHAIN[: 8 * at])
    expected = {f"{pod}:1": 8 * at * BLOCK for at, pod in enumerate(PODS) if at}

    async def exact() -> bool:
        return await reader.match(CHAIN) == expected

    await eventually(exact)
    route = await reader.route(CHAIN, 64 * BLOCK)
    assert [each.address for each in route.candidates] == [f"{pod}:1" for pod in PODS[:0:-1]]
    assert route.candidates[0].cached_tokens == 64 * BLOCK - 1
    # Only the winner's reservation is held once the others were released.

    async def held() -> dict[str, int]:
        return {worker.pod: worker.reserved_tokens for worker in await reader.workers() if worker.reserved_tokens}

    async def one() -> bool:
        return await held() == {"p13": BLOCK}

    await eventually(one)
    await reader.release(route.reservation)
    assert await held() == {}
    writers["p13"].report(WorkerLoad(backlog_tokens=100_000, prefill_rate=1000.0))

    async def turned() -> bool:
        route = await reader.route(CHAIN, 64 * BLOCK)
        await reader.release(route.reservation)
        return route.candidates[0].address == "p7:1"

    await eventually(turned)
    excluded = await reader.route(CHAIN, 64 * BLOCK, exclude=[f"{pod}:1" for pod in PODS])
    assert excluded.candidates == [] and excluded.reservation == b""
    await end(writers, reader)


@either
async def test_a_worker_without_free_pages_ranks_last_whatever_its_group(server: RedisServer, namespace: str) -> None:
    writers, reader = await start(server.url, namespace)
    for pod in PODS[1:]:
        writers[pod].report(WorkerLoad(pages_free=1, pages_total=100, page_size=16))
    writers["p0"].report(WorkerLoad(pages_free=90, pages_total=100, page_size=16, backlog_tokens=5_000))

    async def roomy() -> bool:
        route = await reader.route(CHAIN, 256)
        await reader.release(route.reservation)
        return route.candidates[0].address == "p0:1"

    await eventually(roomy)
    await end(writers, reader)


@either
async def test_a_cold_prefix_has_one_home_for_every_router_and_a_burst_spreads(server: RedisServer, namespace: str) -> None:
    writers, reader = await start(server.url, namespace)
    other = GroupedReader([IndexReader(server.url, each, deadline=2.0) for each in group_namespaces(namespace, GROUPS)])
    homes: dict[int, set[str]] = {}
    for _ in range(2):
        for seed in range(20):
            asked = other if seed % 2 else reader
            route = await asked.route(block_hashes(seed, range(64), BLOCK), 64)
            homes.setdefault(seed, set()).add(route.candidates[0].address)
            await asked.release(route.reservation)
            await asyncio.gather(*asked._releases)
    assert all(len(found) == 1 for found in homes.values())
    assert len({min(found) for found in homes.values()}) >= 4
    routes = await asyncio.gather(*((other if n % 2 else reader).route(CHAIN, 256) for n in range(256)))
    chosen = Counter(route.candidates[0].address for route in routes)
    assert len(chosen) == 9 and max(chosen.values()) <= 2 * 256 / 9, chosen
    await asyncio.gather(*reader._releases, *other._releases)
    assert sum(worker.reserved_tokens for worker in await reader.workers()) == 256 * 256
    await end(writers, reader, other)


@either
async def test_an_unreachable_group_is_left_out(server: RedisServer, namespace: str) -> None:
    writers, reader = await start(server.url, namespace)
    for writer in writers.values():
        writer.store(CHAIN)

    async def all_there() -> bool:
        return len(await reader.match(CHAIN)) == len(PODS)

    await eventually(all_there)
    away = IndexReader(f"redis://127.0.0.1:{free_port()}", namespace, deadline=0.2)
    names = group_namespaces(namespace, GROUPS)
    halved = GroupedReader([IndexReader(server.url, names[0], deadline=2.0), IndexReader(server.url, names[1], deadline=2.0), away])
    kept = {f"{pod}:1" for pod in PODS if namespace_of(namespace, pod, GROUPS) != names[2]}
    assert 0 < len(kept) < len(PODS) and set(await halved.match(CHAIN)) == kept
    assert {each.address for each in (await halved.route(CHAIN, 300)).candidates} == kept
    with pytest.raises(IndexUnavailable):
        await GroupedReader([away]).workers()
    await end(writers, reader, halved)


async def test_groups_of_one_service_lie_on_the_shards_of_a_cluster(namespace: str) -> None:
    version = next(version for version in reversed(VERSIONS) if binary(version))
    with RedisCluster(version) as cluster:
        names = group_namespaces(namespace, GROUPS)
        writers, reader = await start(cluster.url, namespace)
        for writer in writers.values():
            writer.store(CHAIN)

        async def exact() -> bool:
            return await reader.match(CHAIN) == {f"{pod}:1": 64 * BLOCK for pod in PODS}

        await eventually(exact)
        nodes = {node.port for node in cluster.nodes if int(node.command("DBSIZE"))}
        assert nodes == {cluster.owner(f"{SCHEMA}:{{{name}}}:").port for name in names}
        await end(writers, reader)


def test_a_single_group_uses_the_plain_reader() -> None:
    assert isinstance(create_reader("redis://h", "a/b"), IndexReader)
    assert isinstance(create_reader("redis://h", "a/b", 2), GroupedReader)
