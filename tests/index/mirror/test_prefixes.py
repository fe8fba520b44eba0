"""The mirror compared with the truth and with `match`: the same answers under every fault, and answers while Redis is down."""

import asyncio
import random
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from tests.index.conftest import either, either_own, eventually
from tests.index.world import BLOCK, World
from tests.servers.redis_server import RedisServer, free_port

from fairlead_index.hashing import block_hashes
from fairlead_index.mirror.prefix_table import PrefixTable
from fairlead_index.mirror.prefixes import MirrorReader
from fairlead_index.reader import IndexReader, IndexUnavailable
from fairlead_index.worker_load import WorkerCard
from fairlead_index.writer import IndexWriter

PODS = 6
WIPE = "for _, key in ipairs(redis.call('KEYS', '*')) do if key:find(ARGV[1], 1, true) then redis.call('DEL', key) end end"
CHAIN = block_hashes(7, range(64 * BLOCK), BLOCK)


@pytest.fixture
async def mirror(server: RedisServer, namespace: str) -> AsyncIterator[MirrorReader]:
    mirror = MirrorReader(server.url, namespace)
    mirror.start()
    yield mirror
    await mirror.close()


def writer_for(server: RedisServer, namespace: str, pod: str, lease: float = 10.0) -> IndexWriter:
    writer = IndexWriter(server.url, namespace, WorkerCard(pod, f"{pod}:1", BLOCK), lease, buckets=16, call_seconds=1.0)
    writer.start()
    return writer


async def _told(writer: IndexWriter) -> bool:
    return writer.joined and not writer.stats.pending


async def loaded(mirror: MirrorReader) -> bool:
    return mirror.stats.snapshots > 0


async def shows(mirror: MirrorReader, expected: dict[str, int]) -> None:
    async def equal() -> bool:
        return mirror.match(CHAIN) == {f"{pod}:1": blocks * BLOCK for pod, blocks in expected.items()}

    await eventually(lambda: loaded(mirror), 10)
    await eventually(equal)


class Faults:
    """Faults that a mirror cannot follow by reading on: the log trimmed or lost; the namespace wiped or reset as by a failover."""

    def __init__(self, draw: random.Random, server: RedisServer, namespace: str) -> None:
        self._draw, self._client, self._prefix = draw, server.client(), f"fl5:{{{namespace}}}:"
        self._earlier: dict[bytes, bytes] = {}

    def remember(self) -> None:
        """Save the state that `back` restores."""
        keys = [key for key in self._client.keys("*") if key.startswith(self._prefix.encode())]
        with self._client.pipeline(transaction=True) as pipe:
            for key in keys:
                pipe.dump(key)
            dumps = pipe.execute()
        self._earlier = {key: dump for key, dump in zip(keys, dumps, strict=True) if dump is not None}

    def happen(self) -> None:
        kind = self._draw.choice(["trim", "no log", "back", "wipe"])
        if kind == "trim":
            self._client.xtrim(self._prefix + "log", maxlen=0, approximate=False)
        elif kind == "no log":
            self._client.delete(self._prefix + "log")
        else:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.eval(WIPE, 0, self._prefix)
                if kind == "back":
                    for key, dump in self._earlier.items():
                        pipe.restore(key, 0, dump)
                pipe.execute()


@either
@pytest.mark.parametrize("seed", range(2))
async def test_the_mirror_is_exact_after_any_faults(server: RedisServer, namespace: str, mirror: MirrorReader, seed: int) -> None:
    world = World(seed, server.url, namespace)
    reader = IndexReader(server.url, namespace, deadline=5.0)
    late: list[MirrorReader] = []
    faults = Faults(world.random, server, namespace)
    try:
        for _ in range(10):
            if world.random.random() < 0.5:
                faults.remember()
            for _ in range(world.random.randint(5, 30)):
                pod = f"p{world.random.randrange(PODS)}"
                if pod not in world.writers:
                    world.boot(pod)
                action = world.random.random()
                if action < 0.6:
                    world.store(pod)
                elif action < 0.9:
                    world.evict(pod)
                elif action < 0.95:
                    await world.die(pod)
                else:
                    await world.leave(pod)
                if world.random.random() < 0.2:
                    await asyncio.sleep(0.001)
            if world.random.random() < 0.4:
                faults.happen()
            if world.random.random() < 0.2:  # a mirror that starts in the middle of operations
                late.append(MirrorReader(server.url, namespace))
                late[-1].start()

            async def converged() -> bool:
                if {worker.pod for worker in await reader.workers()} != set(world.writers):
                    return False
                expected = [world.expected(world.chain(prompt)) for prompt in world.prompts]
                if [await reader.match(world.chain(prompt)) for prompt in world.prompts] != expected:
                    return False
                # at most 8 levels for 6 pods, so this is exact as well
                if [await reader.deepest(world.chain(prompt), 12, b"", b"") for prompt in world.prompts] != expected:
                    return False
                for each in (mirror, *late):
                    await eventually(lambda: loaded(each), 10)  # noqa: B023 (awaited here)
                    if [each.match(world.chain(prompt)) for prompt in world.prompts] != expected:
                        return False
                return True

            await eventually(converged)
            await reader._scripts.call("sweep", world.random.randint(1, 200))
    finally:
        await asyncio.gather(*(writer.leave() for writer in world.writers.values()), *(each.close() for each in late))
        await reader.close()


@either
async def test_more_holders_than_a_bucket_lists_are_matched(server: RedisServer, namespace: str, mirror: MirrorReader) -> None:
    writers = [writer_for(server, namespace, f"p{n:02}") for n in range(40)]
    late = MirrorReader(server.url, namespace)
    try:
        for n, writer in enumerate(writers):
            writer.store(CHAIN[: n + 1])
        await shows(mirror, {f"p{n:02}": n + 1 for n in range(40)})
        late.start()
        await shows(late, {f"p{n:02}": n + 1 for n in range(40)})
    finally:
        await asyncio.gather(*(writer.leave() for writer in writers))
        await late.close()
    await shows(mirror, {})


@either_own
async def test_the_mirror_answers_while_redis_is_down_and_is_exact_after_an_empty_restart(own_server: RedisServer, namespace: str) -> None:
    writers = {pod: writer_for(own_server, namespace, pod, lease=1.0) for pod in "ab"}
    mirror = MirrorReader(own_server.url, namespace, call_seconds=0.5)
    mirror.start()
    try:
        writers["a"].store(CHAIN)
        writers["b"].store(CHAIN[:9])
        await shows(mirror, {"a": 64, "b": 9})
        own_server.kill()

        async def noticed() -> bool:
            return not mirror.stats.following

        await eventually(noticed)
        until = time.monotonic() + 1.2  # longer than the lease
        while time.monotonic() < until:
            assert mirror.match(CHAIN) == {"a:1": 64 * BLOCK, "b:1": 9 * BLOCK}
            await asyncio.sleep(0.05)
        writers["a"].remove(CHAIN[20:][::-1])
        own_server.start()
        await shows(mirror, {"a": 20, "b": 9})

        async def follows() -> bool:
            return mirror.stats.following and mirror.stats.snapshots >= 2

        await eventually(follows)
    finally:
        await asyncio.gather(*(writer.leave() for writer in writers.values()))
        await mirror.close()


async def test_a_log_that_was_trimmed_and_then_reset_is_detected(server: RedisServer, namespace: str) -> None:
    """A snapshot taken while the log was empty still knows which record was the newest."""
    writer = writer_for(server, namespace, "a")
    mirror = MirrorReader(server.url, namespace)
    client, prefix = server.client(), f"fl5:{{{namespace}}}:"
    try:
        await eventually(lambda: _told(writer))
        client.set(prefix + "r:mirrored", 1)
        for end in (10, 20, 30):
            writer.store(CHAIN[:end])
            await eventually(lambda: _told(writer))
        assert client.delete(prefix + "log")
        mirror.start()
        await shows(mirror, {"a": 30})
        logged = int(client.hget(prefix + "meta", "logged") or 0)
        client.hset(prefix + "meta", "logged", logged - 2)
        for end in (40, 50, 60, 64):  # two records with reused numbers, and two more
            writer.store(CHAIN[:end])
            await eventually(lambda: _told(writer))
        await shows(mirror, {"a": 64})
    finally:
        await writer.leave()
        await mirror.close()


@either
async def test_changes_are_logged_only_while_a_mirror_reads(server: RedisServer, namespace: str) -> None:
    writer, late = writer_for(server, namespace, "a"), MirrorReader(server.url, namespace)
    client, prefix = server.client(), f"fl5:{{{namespace}}}:"
    try:
        writer.store(CHAIN[:10])
        await eventually(lambda: _told(writer))
        assert not client.exists(prefix + "log"), "no mirror reads the log"
        late.start()
        await shows(late, {"a": 10})
        writer.store(CHAIN[:20])
        await shows(late, {"a": 20})
        assert client.xlen(prefix + "log") == 2 and late.stats.snapshots == 1, "the initial state and the change after it"
        client.delete(prefix + "r:mirrored")  # as if all mirrors had been away for long
        writer.store(CHAIN[:30])
        await shows(late, {"a": 30})
        assert late.stats.snapshots == 2, "it detects that something was not logged"
        writer.store(CHAIN)
        await shows(late, {"a": 64})
        assert late.stats.snapshots == 2
    finally:
        await writer.leave()
        await late.close()


@either
async def test_a_silent_worker_is_not_listed_past_its_lease(server: RedisServer, namespace: str, mirror: MirrorReader) -> None:
    silent = writer_for(server, namespace, "a", lease=0.6)
    silent.store(CHAIN)
    await shows(mirror, {"a": 64})
    assert silent._task is not None
    silent._leaving.set()  # dies without telling the index
    assert silent._task is not None
    silent._task.cancel()
    await shows(mirror, {})
    await silent._scripts.close()


async def test_matches_raise_before_the_first_load(namespace: str) -> None:
    mirror = MirrorReader(f"redis://127.0.0.1:{free_port()}/0", namespace, call_seconds=0.2)
    mirror.start()

    async def failed() -> bool:
        return mirror.stats.errors > 0

    await eventually(failed, 10)
    with pytest.raises(IndexUnavailable, match="not mirrored yet"):
        mirror.match(CHAIN)
    await mirror.close()


@pytest.mark.parametrize("seed", range(6))
def test_the_table_equals_plain_sets(seed: int) -> None:
    """Incarnations that start, store, evict and end, with sweeps in between, compared with one set each."""
    draw = random.Random(seed)
    table, truth = PrefixTable(), {}
    chains = [list(range(n * 100, n * 100 + 12)) for n in range(3)]
    for _ in range(400):
        slot = draw.randrange(6).to_bytes(2, "big")
        action, chain = draw.random(), draw.choice(chains)
        if slot not in truth or action < 0.05:
            table.join(slot, slot.hex(), 2)
            truth[slot] = dict.fromkeys(range(3), 0)
        elif action < 0.1:
            table.end(slot)
            del truth[slot]
        elif action < 0.15:
            table.sweep(draw.randrange(1, 20))
        else:
            n, depth = chains.index(chain), draw.randrange(13)
            held = truth[slot][n]
            if depth > held:
                table.store(slot, chain[:depth])
            else:
                table.remove(slot, chain[depth:held][::-1])
            truth[slot][n] = depth
        for n, whole in enumerate(chains):
            assert table.match(whole) == {slot.hex(): 2 * held[n] for slot, held in truth.items() if held[n]}
    while table.sweep(50):
        pass
    for slot in list(truth):
        table.end(slot)
    while table.sweep(50):
        pass
    assert len(table) == 0 and table.num_incarnations == 0


def test_the_share_of_blocks_that_only_one_worker_holds() -> None:
    table = PrefixTable()
    for number, address in enumerate(("a:1", "b:1", "dead:1")):
        table.join(number.to_bytes(2, "big"), address, 16, lease_ms=10_000.0)
    leases = struct.pack("<3d", 5000.0, 5000.0, 0.0)
    table.renew(leases, 1000.0)
    shared, mine = range(1000, 1100), range(2000, 2300)
    table.store(b"\0\0", [*shared, *mine])
    table.store(b"\0\1", shared)
    table.store(b"\0\2", [*shared, *mine])
    assert table.unique_shares() == {"a:1": 0.75, "b:1": 0.0}, "blocks of dead workers do not count"
    table.store(b"\0\1", range(10_000, 60_000))
    assert 0.98 < table.unique_shares()["b:1"] < 1.0, "of a large table, only some shards are sampled"


def test_caches_of_a_large_fleet_are_bounded_in_bytes() -> None:
    """500 workers and one hot block that changes 1,500 times, with a match after each change."""
    draw, table, slots = random.Random(5), PrefixTable(), [number.to_bytes(2, "big") for number in range(500)]
    for slot in slots:
        table.join(slot, f"10.0.0.{int.from_bytes(slot, 'big')}:8000", 16)
        table.store(slot, [1])
    tracemalloc.start()
    try:
        for _ in range(1_500):
            slot = draw.choice(slots)
            (table.remove if table.match([1]).get(f"10.0.0.{int.from_bytes(slot, 'big')}:8000") else table.store)(slot, [1])
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 3 << 20, f"{grown >> 20} MiB"


@pytest.mark.parametrize("seed", range(4))
def test_the_deepest_holders_equal_those_of_a_full_match(seed: int) -> None:
    draw, table = random.Random(seed), PrefixTable()
    chain = list(range(1, 41))
    for number in range(60):
        slot = number.to_bytes(2, "big")
        table.join(slot, f"w{number}", 16)
        table.store(slot, chain[: draw.choice([0, 8, 8, 8, 20, 33, 40])])
    whole = table.match(chain)
    barred = {f"w{number}" for number in range(0, 60, 7)}
    also = [f"w{number}" for number in draw.sample(range(60), 6) if number % 7]
    found = table.deepest(chain, 5, {f"w{number}" for number in range(60)} - barred, also)
    assert found.items() <= whole.items() and {each for each in also if each in whole} <= found.keys()
    best = sorted((tokens for address, tokens in whole.items() if address not in barred), reverse=True)[:5]
    assert sorted((tokens for address, tokens in found.items() if address not in barred), reverse=True)[: len(best)] == best
