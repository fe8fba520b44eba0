"""Redis Cluster and Sentinel for real: the index finds its node, follows it through resharding and failover, and stays exact."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from tests.index.conftest import EITHER, eventually
from tests.servers.redis_cluster import RedisCluster
from tests.servers.redis_server import VERSIONS, RedisServer, binary, free_port

from fairlead_index.hashing import block_hashes
from fairlead_index.mirror.prefixes import MirrorReader
from fairlead_index.reader import IndexReader, IndexUnavailable
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.scripts import SCHEMA
from fairlead_index.worker_load import WorkerCard
from fairlead_index.writer import IndexWriter

BLOCK = 4
CHAIN = block_hashes(7, range(64 * BLOCK), BLOCK)


@pytest.fixture(scope="module", params=EITHER)
def cluster(request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    if binary(request.param) is None:
        pytest.skip(f"no redis-server {request.param} on this machine: make redis-servers")
    with RedisCluster(request.param) as running:
        yield running


class Service:
    """Two workers, a reader and a mirror on one Redis."""

    def __init__(self, url: str | RedisAccess, namespace: str) -> None:
        self.writers = [IndexWriter(url, namespace, WorkerCard(pod, f"{pod}:1", BLOCK), 1.0, buckets=64, call_seconds=1.0) for pod in "ab"]
        self.reader = IndexReader(url, namespace, deadline=1.0)
        self.mirror = MirrorReader(url, namespace, call_seconds=1.0)

    async def __aenter__(self) -> "Service":
        for part in (*self.writers, self.mirror):
            part.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(writer.leave() for writer in self.writers), self.reader.close(), self.mirror.close())

    async def shows(self, *blocks: int) -> None:
        expected = {f"{pod}:1": count * BLOCK for pod, count in zip("ab", blocks, strict=True)}

        async def equal() -> bool:
            try:
                return await self.reader.match(CHAIN) == expected == self.mirror.match(CHAIN)
            except IndexUnavailable:
                return False

        await eventually(equal, 30)


async def test_the_right_node_is_found_from_any_node(cluster: RedisCluster, namespace: str) -> None:
    for at, name in enumerate("xyz"):  # three namespaces, most likely on different nodes, each reached from one node
        async with Service(f"redis://127.0.0.1:{cluster.nodes[at].port}", f"{namespace}{name}") as service:
            service.writers[0].store(CHAIN)
            service.writers[1].store(CHAIN[:9])
            await service.shows(64, 9)


async def test_resharding_loses_nothing(cluster: RedisCluster, namespace: str) -> None:
    prefix = f"{SCHEMA}:{{{namespace}}}:"
    async with Service(cluster.url, namespace) as service:
        service.writers[0].store(CHAIN)
        service.writers[1].store(CHAIN[:9])
        await service.shows(64, 9)
        source = cluster.owner(prefix)
        target = next(node for node in cluster.nodes if node is not source)

        def half_way() -> None:
            service.writers[0].remove(CHAIN[20:][::-1])

        await asyncio.to_thread(cluster.move, prefix, target, half_way)
        assert cluster.owner(prefix) is target
        await service.shows(20, 9)
        assert [writer.stats.joins for writer in service.writers] == [1, 1]  # migrated, not sent again


async def test_a_primary_that_dies_is_replaced(namespace: str) -> None:
    version = next(version for version in reversed(VERSIONS) if binary(version))
    prefix = f"{SCHEMA}:{{{namespace}}}:"
    with RedisCluster(version) as cluster:
        old = cluster.owner(prefix)
        cluster.add_replica(old)
        async with Service(cluster.url, namespace) as service:
            service.writers[0].store(CHAIN)
            service.writers[1].store(CHAIN[:9])
            await service.shows(64, 9)
            old.kill()
            began = time.monotonic()
            with pytest.raises(IndexUnavailable):
                await service.reader.match(CHAIN)
            assert time.monotonic() - began < 1.5
            assert service.mirror.match(CHAIN) == {"a:1": 64 * BLOCK, "b:1": 9 * BLOCK}
            await asyncio.to_thread(cluster.wait_for_failover, prefix, old)
            service.writers[0].remove(CHAIN[20:][::-1])
            await service.shows(20, 9)


@pytest.mark.parametrize("version", EITHER)
async def test_sentinels_name_the_primary(namespace: str, tmp_path: Path, version: str) -> None:
    """The sentinels have a user and a password of their own, and the servers another password."""
    port = free_port()
    config, sentinel_user, sentinel_password, password = (
        tmp_path / name for name in ("sentinel.conf", "sentinel-username", "sentinel-password", "password")
    )
    with RedisServer(version) as first, RedisServer(version) as second:
        second.command("REPLICAOF", "127.0.0.1", first.port)
        config.write_text(
            f"sentinel monitor index 127.0.0.1 {first.port} 1\nsentinel down-after-milliseconds index 500\n"
            "sentinel failover-timeout index 2000\nsentinel auth-user index default\nsentinel auth-pass index data\n"
        )
        with RedisServer(version, port=port, options=("--sentinel",), config=config) as sentinel:
            await asyncio.to_thread(_replica_known, port)
            for server in (first, second):
                server.command("CONFIG", "SET", "masterauth", "data")
                server.command("CONFIG", "SET", "requirepass", "data")
            rights = ("+sentinel|get-master-addr-by-name",)
            sentinel.command("ACL", "SETUSER", "watcher", "on", ">seen", "resetkeys", "resetchannels", "nocommands", *rights)
            sentinel.command("ACL", "SETUSER", "default", "off")
            password.write_text("data")
            sentinel_user.write_text("watcher\n")
            sentinel_password.write_text("wrong\n")
            access = RedisAccess(
                f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/index",  # the first sentinel is down
                str(password.parent),
            )
            refused = IndexReader(access, namespace, deadline=1.0)
            with pytest.raises(IndexUnavailable, match="WRONGPASS"):
                await refused.match(CHAIN)
            await refused.close()
            sentinel_password.write_text("seen\n")
            async with Service(access, namespace) as service:
                service.writers[0].store(CHAIN)
                service.writers[1].store(CHAIN[:9])
                await service.shows(64, 9)
                first.kill()
                service.writers[0].remove(CHAIN[20:][::-1])
                await service.shows(20, 9)
                with contextlib.closing(redis.Redis(port=second.port, password="data")) as client:
                    assert client.role()[0] == b"master"


def _replica_known(port: int) -> None:
    client = redis.Redis(port=port)
    give_up = time.monotonic() + 15
    while client.sentinel_master("index")["num-slaves"] < 1:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    client.close()
