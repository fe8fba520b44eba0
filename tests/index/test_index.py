"""Writer and reader over a real Redis: the guarantees that an operator of this system relies on."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable

import pytest
from tests.index.conftest import either, eventually
from tests.servers.redis_server import RedisServer, free_port

from fairlead_index.hashing import block_hashes
from fairlead_index.mirror.workers import FleetReader
from fairlead_index.reader import IndexReader, IndexUnavailable
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter

BLOCK = 4
CHAIN = block_hashes(7, range(64 * BLOCK), BLOCK)  # 64 blocks

MakeWriter = Callable[..., IndexWriter]


def writer_for(server: RedisServer, namespace: str, pod: str, lease: float = 10.0) -> IndexWriter:
    writer = IndexWriter(server.url, namespace, WorkerCard(pod, f"{pod}:8000", BLOCK, "r1"), lease, call_seconds=1.0)
    writer.start()
    return writer


@pytest.fixture
async def writers(server: RedisServer, namespace: str) -> AsyncIterator[Callable[..., IndexWriter]]:
    made: list[IndexWriter] = []

    def make(pod: str, lease: float = 10.0) -> IndexWriter:
        made.append(writer_for(server, namespace, pod, lease))
        return made[-1]

    yield make
    await asyncio.gather(*(writer.leave() for writer in made))


@pytest.fixture
async def reader(server: RedisServer, namespace: str) -> AsyncIterator[IndexReader]:
    reader = IndexReader(server.url, namespace, deadline=5.0)
    yield reader
    await reader.close()


async def shows(reader: IndexReader, expected: dict[str, int]) -> None:
    """Wait until a match of CHAIN gives these blocks."""

    async def equal() -> bool:
        try:
            return await reader.match(CHAIN) == {f"{pod}:8000": blocks * BLOCK for pod, blocks in expected.items()}
        except IndexUnavailable:
            return False

    await eventually(equal)


@either
async def test_stored_blocks_match_and_removed_ones_do_not(writers: MakeWriter, reader: IndexReader) -> None:
    a, b = writers("a"), writers("b")
    a.store(CHAIN)
    b.store(CHAIN[:10])
    await shows(reader, {"a": 64, "b": 10})
    a.remove(CHAIN[20:][::-1])
    await shows(reader, {"a": 20, "b": 10})
    assert a.joined and a.stats.held == 20 and a.stats.joins == 1


@either
async def test_leaving_is_immediate_and_final(writers: MakeWriter, reader: IndexReader) -> None:
    a = writers("a")
    a.store(CHAIN)
    await shows(reader, {"a": 64})
    await a.leave()
    a.store(CHAIN)
    a.report(WorkerLoad())
    assert await reader.match(CHAIN) == {} and await reader.workers() == []
    assert not a.joined


@either
async def test_a_restarted_pod_starts_with_an_empty_set(
    server: RedisServer, namespace: str, writers: MakeWriter, reader: IndexReader
) -> None:
    old = writers("a")
    old.store(CHAIN)
    await shows(reader, {"a": 64})
    [first_life] = await reader.workers()
    await old._scripts.close()
    assert old._task is not None
    old._task.cancel()  # dies without telling the index
    again = writers("a")
    again.store(CHAIN[:3])
    await shows(reader, {"a": 3})
    [second_life] = await reader.workers()
    assert (second_life.pod, second_life.slot != first_life.slot) == (first_life.pod, True)


@either
async def test_a_silent_pod_is_dropped_when_its_lease_ends(writers: MakeWriter, reader: IndexReader) -> None:
    a = writers("a", lease=0.5)
    a.store(CHAIN)
    await shows(reader, {"a": 64})
    assert a._task is not None
    a._task.cancel()
    await shows(reader, {})
    assert await reader.match(CHAIN) == {} and await reader.workers() == []


@either
async def test_a_wiped_redis_gets_everything_again(server: RedisServer, writers: MakeWriter, reader: IndexReader) -> None:
    a = writers("a", lease=1.0)
    a.store(CHAIN)
    await shows(reader, {"a": 64})
    server.client().flushall()
    await shows(reader, {"a": 64})
    assert a.stats.joins == 2 and a.stats.stale == 1
    server.client().script_flush()
    a.remove(CHAIN[32:][::-1])
    await shows(reader, {"a": 32})


@either
async def test_a_gap_in_the_sequence_causes_a_new_snapshot(
    server: RedisServer, namespace: str, writers: MakeWriter, reader: IndexReader
) -> None:
    """A failover to a replica that missed a batch leaves the fence behind the writer."""
    a = writers("a", lease=1.0)
    a.store(CHAIN[:32])
    await shows(reader, {"a": 32})
    client, meta = server.client(), f"fl5:{{{namespace}}}:meta"
    fences = {field: value for field, value in client.hgetall(meta).items() if field.startswith(b"f")}
    a.store(CHAIN)
    await shows(reader, {"a": 64})
    client.hset(meta, mapping=fences)
    await eventually(lambda: _is(a.stats.joins == 2))
    await shows(reader, {"a": 64})
    assert a.stats.gaps == 1


@either
async def test_a_resync_makes_the_worker_send_everything_again(writers: MakeWriter, reader: IndexReader) -> None:
    a = writers("a", lease=1.0)
    a.store(CHAIN)
    await shows(reader, {"a": 64})
    [before] = await reader.workers()
    assert await reader.recall("a:8000")
    await eventually(lambda: _is(a.stats.joins == 2))
    await shows(reader, {"a": 64})
    [after] = await reader.workers()
    assert after.slot != before.slot and after.incarnation == a.incarnation != before.incarnation
    assert not await reader.recall("nobody:8000")


async def _is(value: bool) -> bool:
    return value


async def test_redis_killed_and_restarted_empty_converges(own_server: RedisServer, namespace: str) -> None:
    pods = {name: writer_for(own_server, namespace, name, lease=2.0) for name in "abc"}
    reader = IndexReader(own_server.url, namespace, deadline=2.0)
    try:
        for at, pod in enumerate(pods.values()):
            pod.store(CHAIN[: 20 + at])
        await shows(reader, {"a": 20, "b": 21, "c": 22})
        own_server.kill()
        with pytest.raises(IndexUnavailable):
            await reader.match(CHAIN)
        pods["a"].remove(CHAIN[10:20][::-1])  # while Redis is down
        pods["b"].store(CHAIN)
        own_server.start()
        await shows(reader, {"a": 10, "b": 64, "c": 22})
    finally:
        await asyncio.gather(*(pod.leave() for pod in pods.values()))
        await reader.close()


async def test_a_frozen_redis_costs_the_deadline_at_most_twice(own_server: RedisServer, namespace: str) -> None:
    pod = writer_for(own_server, namespace, "a", lease=5.0)
    reader = IndexReader(own_server.url, namespace, deadline=0.2)
    pod.store(CHAIN)
    await shows(reader, {"a": 64})
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(IndexUnavailable):
                await reader.match(CHAIN)
        assert time.monotonic() - began < 1.0
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(IndexUnavailable):
                await reader.match(CHAIN)
        assert time.monotonic() - began < 0.1
        pod.remove(CHAIN[8:][::-1])
        began = time.monotonic()
        await asyncio.wait_for(pod.leave(timeout=0.3), 5)
        assert time.monotonic() - began < 1.0
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
        await reader.close()


async def test_one_late_answer_costs_one_request(own_server: RedisServer, namespace: str) -> None:
    pod = writer_for(own_server, namespace, "a", lease=5.0)
    reader = IndexReader(own_server.url, namespace, deadline=0.3)
    try:
        pod.store(CHAIN)
        await shows(reader, {"a": 64})
        os.kill(own_server.pid, signal.SIGSTOP)
        with pytest.raises(IndexUnavailable):
            await reader.match(CHAIN)
        os.kill(own_server.pid, signal.SIGCONT)
        assert await reader.match(CHAIN)
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
        await pod.leave()
        await reader.close()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:{port}/0", "unix:///nowhere/redis.sock", "redis://no-such-host.invalid:6379"])
async def test_a_wrong_url_is_unavailable_quickly(url: str, namespace: str) -> None:
    reader = IndexReader(url.format(port=free_port()), namespace)
    began = time.monotonic()
    with pytest.raises(IndexUnavailable):
        await reader.workers()
    assert time.monotonic() - began < 1.0
    began = time.monotonic()
    for _ in range(1000):
        with pytest.raises(IndexUnavailable):
            await reader.match(CHAIN)
    assert time.monotonic() - began < 1.0
    await reader.close()


async def test_a_url_that_can_never_work_is_refused_immediately(namespace: str) -> None:
    with pytest.raises(ValueError, match="redis url"):
        IndexReader("http://redis:6379", namespace)
    with pytest.raises(ValueError, match="namespace"):
        IndexReader("redis://127.0.0.1", "a{b}")


async def test_without_redis_a_writer_stores_no_more_than_the_held_set(namespace: str) -> None:
    writer = IndexWriter(f"redis://127.0.0.1:{free_port()}", namespace, WorkerCard("a", "a:1", BLOCK))
    writer.start()
    for _ in range(300):
        writer.store(CHAIN)
        writer.remove(CHAIN[::-1])
    writer.report(WorkerLoad(running=1))
    await eventually(lambda: _is(writer.stats.errors > 0))
    assert (writer.stats.held, writer.stats.pending, writer.joined) == (0, 0, False)
    await writer.leave(timeout=0.5)


@either
async def test_loads_reach_the_readers(writers: MakeWriter, reader: IndexReader) -> None:
    load = WorkerLoad(3, 2, 1000, 5000.5, 0.02, 10, 100, 16)
    a = writers("a", lease=2.0)
    a.report(load)

    async def seen() -> bool:
        return [worker.load for worker in await reader.workers()] == [load]

    await eventually(seen)
    worker = (await reader.workers())[0]
    assert (worker.pod, worker.address, worker.block_tokens, worker.revision) == ("a", "a:8000", BLOCK, "r1")
    assert 0 < worker.lease_seconds <= 2.0


async def joined(*pods: IndexWriter) -> None:
    await eventually(lambda: _is(all(pod.joined and pod.stats.pending == 0 for pod in pods)))


@either
async def test_reservations_expire_with_the_heartbeats(
    server: RedisServer, namespace: str, writers: MakeWriter, reader: IndexReader
) -> None:
    """A dead router holds no worker's time: a worker's report settles reservations of requests that must have arrived before it."""
    a = writers("a", lease=1.0)
    await joined(a)
    fleet = FleetReader(server.url, namespace)
    fleet.start()
    await eventually(lambda: _is("a:8000" in fleet.workers))
    fleet.reserve("a:8000", 256.0)
    await fleet.close()
    assert (await reader.workers())[0].reserved_tokens == 256

    async def settled() -> bool:
        a.report(WorkerLoad())
        return (await reader.workers())[0].reserved_tokens == 0

    await eventually(settled)
