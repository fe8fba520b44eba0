"""A Redis without memory: leases go on, removals are accepted, and nothing that was refused is lost."""

import asyncio
import contextlib
import logging
import struct
import time
from typing import Any

import pytest
import redis
from tests.index.conftest import as_coroutine, either_own, equals, eventually
from tests.servers.redis_server import RedisServer

from fairlead_index.hashing import block_hashes
from fairlead_index.reader import IndexReader
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter

BLOCK = 4
CHAIN = block_hashes(7, range(64 * BLOCK), BLOCK)


@either_own
async def test_a_full_redis_keeps_leases_and_accepts_removals(
    own_server: RedisServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = IndexReader(own_server.url, namespace, deadline=2.0)
    a = IndexWriter(own_server.url, namespace, WorkerCard("a", "a:1", BLOCK), 0.5, buckets=64)
    a.start()
    a.store(CHAIN[:32])
    await eventually(lambda: equals(lambda: reader.match(CHAIN), {"a:1": 32 * BLOCK}))
    with caplog.at_level(logging.INFO, logger="fairlead_index"):
        own_server.command("CONFIG", "SET", "maxmemory", "100kb")
        a.store(CHAIN)
        a.remove(CHAIN[20:][::-1])
        a.store(CHAIN[:40])
        await eventually(lambda: equals(lambda: reader.match(CHAIN), {"a:1": 20 * BLOCK}))
        await eventually(lambda: as_coroutine(a.stats.full and a.joined and a.stats.pending == 0))
        with contextlib.suppress(redis.ResponseError):  # 6.2 has none
            own_server.command("FUNCTION", "FLUSH")  # as if this release were new to the server
        b = IndexWriter(own_server.url, namespace, WorkerCard("b", "b:1", BLOCK), 0.5, buckets=64)
        b.start()
        b.store(CHAIN[:4])
        until = time.monotonic() + 1.2  # more than two leases
        while time.monotonic() < until:
            a.report(WorkerLoad(running=1))
            await asyncio.sleep(0.05)
        assert {worker.pod: worker.load.running for worker in await reader.workers()} == {"a": 1, "b": 0}
        slot = (await reader.workers())[0].slot.to_bytes(2, "big")
        await reader._scripts.call("reserve", b"router-1", b"", b"+" + slot + bytes(8) + struct.pack("<d", 300.0))
        assert sum(worker.reserved_tokens for worker in await reader.workers()) == 300
        a.remove(CHAIN[10:40][::-1])
        await eventually(lambda: equals(lambda: reader.match(CHAIN), {"a:1": 10 * BLOCK}))
        own_server.command("CONFIG", "SET", "maxmemory", "0")
        a.store(CHAIN)
        await eventually(lambda: equals(lambda: reader.match(CHAIN), {"a:1": 64 * BLOCK, "b:1": 4 * BLOCK}))
    assert a.stats.joins == 1 and not a.stats.full and a.stats.errors == 0
    said = [record.getMessage() for record in caplog.records]
    assert [sum(part in line for line in said) for part in ("redis is full", "memory again")] == [2, 2]  # once for each worker
    await asyncio.gather(a.leave(), b.leave(), reader.close())


@either_own
async def test_removals_during_a_resync_of_a_full_redis_are_not_lost(own_server: RedisServer, namespace: str) -> None:
    reader = IndexReader(own_server.url, namespace, deadline=2.0)
    a = IndexWriter(own_server.url, namespace, WorkerCard("a", "a:1", BLOCK), 10.0, buckets=64)
    tell, late = a._scripts.call, [CHAIN[20:40][::-1]]

    async def call(name: str, *args: bytes | str | int | float) -> list[Any]:
        reply = await tell(name, *args)
        if name == "evict" and len(args) > 3 and late:  # while the answer was under way, and the time to send everything has come
            a.remove(late.pop())
            a._store_at = 0.0
        return reply

    a._scripts.call = call  # type: ignore[method-assign]
    a.start()
    a.store(CHAIN)
    await eventually(lambda: equals(lambda: reader.match(CHAIN), {"a:1": 64 * BLOCK}))
    own_server.command("CONFIG", "SET", "maxmemory", "1")
    a.store([1, 2, 3])
    await eventually(lambda: as_coroutine(a.stats.full and not a.stats.pending))
    own_server.command("CONFIG", "SET", "maxmemory", "0")
    a.remove(CHAIN[40:][::-1])
    await eventually(lambda: equals(lambda: reader.match(CHAIN), {"a:1": 20 * BLOCK}))
    await eventually(lambda: equals(lambda: reader.match([1, 2, 3]), {"a:1": 3 * BLOCK}))
    assert a.stats.joins == 1
    await asyncio.gather(a.leave(), reader.close())


@either_own
async def test_a_batch_applied_with_a_lost_reply_before_redis_was_full_counts_once(own_server: RedisServer, namespace: str) -> None:
    """The next batch must not reuse its number: Redis would take it for the old one and skip it."""
    reader = IndexReader(own_server.url, namespace, deadline=2.0)
    a = IndexWriter(own_server.url, namespace, WorkerCard("a", "a:1", BLOCK), 10.0, buckets=64)
    tell, heard = a._scripts.call, [True]

    async def call(name: str, *args: bytes | str | int | float) -> list[Any]:
        reply = await tell(name, *args)
        if name == "apply" and not heard[0]:
            heard[0] = True
            own_server.command("CONFIG", "SET", "maxmemory", "1")
            a.remove(CHAIN[54:][::-1])  # one batch
            raise TimeoutError("the answer was lost")
        return reply

    a._scripts.call = call  # type: ignore[method-assign]
    a.start()
    a.store(CHAIN)
    await eventually(lambda: equals(lambda: reader.match(CHAIN), {"a:1": 64 * BLOCK}))
    await eventually(lambda: as_coroutine(not a.stats.pending))
    heard[0] = False
    a.store([1, 2, 3])
    await eventually(lambda: as_coroutine(heard[0] and not a.stats.pending))
    assert await reader.match(CHAIN) == {"a:1": 54 * BLOCK} and await reader.match([1, 2, 3]) == {"a:1": 3 * BLOCK}
    assert (a.stats.joins, a.stats.gaps) == (1, 0)
    await asyncio.gather(a.leave(), reader.close())
