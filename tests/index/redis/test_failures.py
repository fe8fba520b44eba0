"""Redis failures and the index: refused, slow, unreachable or full; and two releases that share one Redis."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import redis
from tests.index.conftest import as_coroutine, either, equals, eventually
from tests.servers.redis_server import RedisServer

from fairlead_index.hashing import block_hashes
from fairlead_index.reader import IndexReader, IndexUnavailable
from fairlead_index.redis import scripts as connection
from fairlead_index.redis.scripts import SCHEMA
from fairlead_index.worker_load import WorkerCard
from fairlead_index.writer import IndexWriter

BLOCK = 4
CHAIN = block_hashes(7, range(64 * BLOCK), BLOCK)

ERRORS = [
    b"-READONLY You can't write against a read only replica.\r\n",
    b"-LOADING Redis is loading the dataset in memory\r\n",
    b"-CLUSTERDOWN The cluster is down\r\n",
    b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
    b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.\r\n",
    b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    b"-BUSY Redis is busy running a script.\r\n",
    b"-MOVED 12 127.0.0.1:1\r\n",
    b"-ASK 12 127.0.0.1:1\r\n",
    b"this is no redis\r\n",
    b"",  # closes the connection
]


@asynccontextmanager
async def between(server: RedisServer, answer: Callable[[], bytes | None]) -> AsyncIterator[str]:
    """A proxy before the server. While `answer` is not empty it answers itself; with an empty answer it closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", server.port)

        async def back() -> None:
            while data := await upstream_reader.read(65536):
                writer.write(data)
            writer.close()

        returning = asyncio.create_task(back())
        while data := await reader.read(65536):
            own = answer()
            if own is None:
                upstream.write(data)
            elif own:
                writer.write(own)
            else:
                break
        returning.cancel()
        for each in (upstream, writer):
            each.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


@either
@pytest.mark.parametrize("said", ERRORS, ids=lambda said: said.split()[0].decode() if said else "closed")
async def test_every_call_ends_in_time_and_the_index_recovers(server: RedisServer, namespace: str, said: bytes) -> None:
    answer: list[bytes | None] = [None]
    async with between(server, lambda: answer[0]) as url:
        writer = IndexWriter(url, namespace, WorkerCard("a", "a:1", BLOCK), 0.5, call_seconds=0.5)
        reader = IndexReader(url, namespace, deadline=0.5)
        writer.start()
        writer.store(CHAIN)

        async def matched() -> dict[str, int] | None:
            try:
                return await reader.match(CHAIN)
            except IndexUnavailable:
                return None

        await eventually(lambda: equals(matched, {"a:1": 64 * BLOCK}))
        answer[0] = said
        began = time.monotonic()
        with pytest.raises(IndexUnavailable):
            await reader.match(CHAIN)
        assert time.monotonic() - began < 0.7
        writer.remove(CHAIN[20:][::-1])
        answer[0] = None
        await eventually(lambda: equals(matched, {"a:1": 20 * BLOCK}))
        await writer.leave()
        await reader.close()


async def test_a_connection_that_stays_silent_is_replaced() -> None:
    """As after the loss of a node: the kernel reports nothing, and no caller waits longer than its deadline."""
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        is_lost = opened == 1
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                if not is_lost:
                    writer.write(b"*0\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader = IndexReader(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", "tests/none", deadline=0.05)

    async def matched() -> bool:
        began = time.monotonic()
        try:
            return await reader.match(CHAIN) == {}
        except IndexUnavailable:
            assert time.monotonic() - began < 1.0
            return False

    await eventually(matched, 10.0)
    assert opened == 2
    await reader.close()
    server.close()


async def test_a_primary_demoted_to_replica_and_promoted_again(own_server: RedisServer, namespace: str) -> None:
    """READONLY, and MASTERDOWN or an empty data set, from a real server."""
    writer = IndexWriter(own_server.url, namespace, WorkerCard("a", "a:1", BLOCK), 0.5, call_seconds=0.5)
    reader = IndexReader(own_server.url, namespace, deadline=0.5)
    writer.start()
    writer.store(CHAIN)

    async def matched() -> dict[str, int] | None:
        try:
            return await reader.match(CHAIN)
        except IndexUnavailable:
            return None

    await eventually(lambda: equals(matched, {"a:1": 64 * BLOCK}))
    own_server.command("REPLICAOF", "127.0.0.1", 1)
    writer.remove(CHAIN[20:][::-1])
    await eventually(lambda: as_coroutine("READONLY" in writer.stats.last_error))
    own_server.command("REPLICAOF", "NO", "ONE")
    await eventually(lambda: equals(matched, {"a:1": 20 * BLOCK}))
    assert writer.stats.joins == 1
    await asyncio.gather(writer.leave(), reader.close())


async def test_an_overwritten_key_is_logged_once_and_deleting_it_repairs_the_index(
    own_server: RedisServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = IndexReader(own_server.url, namespace, deadline=2.0)
    a = IndexWriter(own_server.url, namespace, WorkerCard("a", "a:1", BLOCK), 0.5, buckets=64)
    client, prefix = own_server.client(), f"{SCHEMA}:{{{namespace}}}:"
    a.start()
    a.store(CHAIN)
    await eventually(lambda: equals(lambda: reader.match(CHAIN), {"a:1": 64 * BLOCK}))
    with caplog.at_level(logging.INFO, logger="fairlead_index.writer"):
        client.delete(prefix + "meta")
        client.set(prefix + "meta", "x")
        await eventually(lambda: as_coroutine(a.stats.errors > 3))
        for key in client.scan_iter(prefix.replace("{", "\\{") + "*"):
            client.delete(key)
        await eventually(lambda: equals(lambda: reader.match(CHAIN), {"a:1": 64 * BLOCK}))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert sum("delete all keys that begin with " + prefix in line for line in said) == 1, said
    assert sum("blocks again" in line for line in said) == 1, said
    await asyncio.gather(a.leave(), reader.close())


async def test_every_key_expires(server: RedisServer, namespace: str) -> None:
    reader = IndexReader(server.url, namespace, deadline=20.0)
    writers = [IndexWriter(server.url, namespace, WorkerCard(f"p{n}", f"p{n}:1", BLOCK), 0.3, buckets=16) for n in range(34)]
    for writer in writers:
        writer.start()
        writer.store(CHAIN)
    await eventually(lambda: equals(lambda: reader.match(CHAIN), {f"p{n}:1": 64 * BLOCK for n in range(34)}))
    client = server.client()

    def keys() -> dict[bytes, int]:
        """Return the seconds until each key expires."""
        found = list(client.scan_iter(f"{SCHEMA}:{{{namespace}}}:*", count=1000))
        return {key: seconds for key in found if (seconds := client.ttl(key)) != -2}  # -2: it has just expired

    for _ in range(3):
        await reader.match(CHAIN)
        client.persist(f"{SCHEMA}:{{{namespace}}}:b\x00\x00\x03")  # as if it had been renewed long ago
        client.hdel(f"{SCHEMA}:{{{namespace}}}:meta", "renewed")
    await eventually(lambda: equals(lambda: as_coroutine(-1 in keys().values()), False))
    await asyncio.gather(*(writer.leave() for writer in writers[:-1]))
    last = writers[-1]
    assert last._task is not None
    last._leaving.set()  # dies without telling the index
    last._task.cancel()
    await asyncio.wait({last._task})
    left = keys()
    assert left and all(0 < seconds <= 86400 for seconds in left.values()), left
    await last._scripts.close()
    await reader.close()


async def test_two_schemas_share_one_redis_and_scripts_are_loaded_again(
    server: RedisServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two sides of a rollout: another schema is another index. A server that lost its scripts gets them again, under load."""
    old = IndexWriter(server.url, namespace, WorkerCard("old", "old:1", BLOCK), 1.0)
    old.start()
    reader = IndexReader(server.url, namespace, deadline=2.0)
    with monkeypatch.context() as newer:
        newer.setattr(connection, "SCHEMA", "fl0")
        other = IndexWriter(server.url, namespace, WorkerCard("other", "other:1", BLOCK), 1.0)
        other_reader = IndexReader(server.url, namespace, deadline=2.0)
    other.start()
    await eventually(lambda: as_coroutine(old.joined and other.joined))
    for depth in range(1, 65):
        old.store(CHAIN[:depth])
        other.store(CHAIN[: depth // 2])
        if depth % 16 == 0:
            server.command("SCRIPT", "FLUSH")  # as a restart loses them
            with contextlib.suppress(redis.ResponseError):  # 6.2 has none
                server.command("FUNCTION", "FLUSH")
            await reader.match(CHAIN)
    await eventually(lambda: equals(lambda: reader.match(CHAIN), {"old:1": 64 * BLOCK}))
    await eventually(lambda: equals(lambda: other_reader.match(CHAIN), {"other:1": 32 * BLOCK}))
    assert (old.stats.joins, other.stats.joins) == (1, 1)
    await asyncio.gather(old.leave(), other.leave(), reader.close(), other_reader.close())
