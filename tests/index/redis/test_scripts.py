"""The scripts themselves, without the writer: fences, slots, wide sets, the sweep."""

import os
import random
import struct
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from tests.index.conftest import either, eventually
from tests.index.pair import shift_clock
from tests.index.runs import along
from tests.servers.redis_server import RedisServer

from fairlead_index.changes import Changes, pack
from fairlead_index.hashing import block_hashes, hash_bytes
from fairlead_index.reader import unpack_holder
from fairlead_index.redis.scripts import Scripts

CHAIN = list(block_hashes(7, range(64), 4))  # 16 blocks of 4 tokens


class Pod:
    """A worker that calls the scripts directly."""

    def __init__(self, scripts: Scripts, name: str) -> None:
        self.scripts, self.name = scripts, name
        self.epoch, self.slot, self.sequence = b"", b"", 0

    async def join(self, lease_ms: int = 60_000) -> "Pod":
        self.epoch, self.sequence = os.urandom(8), 0
        reply = await self.scripts.call("join", self.name, f"{self.name}:1", "r", 4, self.epoch, lease_ms, 64)
        assert reply[0] == b"OK"
        self.slot = reply[1]
        return self

    async def apply(self, kind: str, hashes: list[int], sequence: int | None = None) -> list[bytes | int]:
        number = self.sequence + 1 if sequence is None else sequence
        reply = await self.scripts.call("apply", self.slot, self.epoch, number, *along(kind, hashes))
        if reply[0] == b"OK":
            self.sequence = number
        return reply

    async def tell(self, changes: Changes) -> list[bytes | int]:
        """Send all pending changes in one batch."""
        self.sequence += 1
        return await self.scripts.call("apply", self.slot, self.epoch, self.sequence, *pack(changes.take(10**6)))

    async def beat(self, sequence: int | None = None, **load: float) -> list[bytes | int]:
        fields = ["running", "waiting", "backlog", "rate", "step", "free", "total", "page", "arrivals"]
        values = [load.get(field, 0) for field in fields]
        number = self.sequence if sequence is None else sequence
        return await self.scripts.call("heartbeat", self.slot, self.epoch, number, 0 if load else -1, *values)


@pytest.fixture
async def scripts(server: RedisServer, namespace: str) -> AsyncIterator[Scripts]:
    scripts = Scripts(server.url, namespace, timeout=5)
    yield scripts
    await scripts.close()


async def allow_recalls(scripts: Scripts) -> None:
    """Reset the resync limiter, as if the last resync were long ago."""
    await scripts.redis.execute("DEL", scripts.key("r:recalled"), scripts.key("r:recalled:a:1"))


async def matched(scripts: Scripts, hashes: list[int] = CHAIN, *limits: int | bytes) -> dict[str, int]:
    reply = await scripts.call("match", hash_bytes(hashes), *limits)
    return {address: tokens // 4 for address, tokens, _ in map(unpack_holder, reply)}


async def test_match_names_every_depth(scripts: Scripts) -> None:
    for number, depth in enumerate((16, 9, 9, 1, 0)):
        await (await Pod(scripts, f"pod{number}").join()).apply("S", CHAIN[:depth])
    assert sorted((await matched(scripts)).values()) == [1, 9, 9, 16]
    assert await matched(scripts, []) == {}


async def test_log_record_ids_grow_with_time(scripts: Scripts) -> None:
    """A mirror reads ids larger than its last one. After a failover a number is reused, so the time has to decide."""
    pod = await Pod(scripts, "a").join()
    await scripts.redis.execute("SET", scripts.key("r:mirrored"), 1)
    for depth in range(1, 60):
        await pod.apply("S", CHAIN[:1] if depth % 2 else [])
    ids = [name.split(b"-") for name, _ in await scripts.redis.execute("XRANGE", scripts.key("log"), "-", "+")]
    assert len(ids) > 50 and all(len(time) == 16 for _, time in ids), "seconds and six digits of microseconds"


async def test_a_repeated_batch_counts_once_and_a_missing_one_is_a_gap(scripts: Scripts) -> None:
    pod = await Pod(scripts, "a").join()
    assert await pod.apply("S", CHAIN[:4]) == [b"OK"]
    assert await pod.apply("S", CHAIN[:4], sequence=1) == [b"OK"]
    assert await pod.apply("S", CHAIN[:5], sequence=3) == [b"GAP", 1]
    assert await pod.apply("S", CHAIN[:5], sequence=0) == [b"GAP", 1]
    assert await pod.beat(sequence=2) == [b"GAP", 1]
    assert await matched(scripts) == {"a:1": 4}


async def test_an_older_incarnation_ends_immediately_and_is_fenced(scripts: Scripts) -> None:
    old = await Pod(scripts, "a").join()
    await old.apply("S", CHAIN)
    new = await Pod(scripts, "a").join()
    assert await matched(scripts) == {}
    assert await old.apply("S", CHAIN[:1]) == [b"STALE"]
    assert await old.beat() == [b"STALE"]
    await scripts.call("leave", "a", old.epoch)  # must not touch the new incarnation
    assert await new.apply("S", CHAIN[:2]) == [b"OK"]
    assert await matched(scripts) == {"a:1": 2}


async def test_a_new_pod_at_an_old_address_ends_the_old_pod(scripts: Scripts) -> None:
    await (await Pod(scripts, "a").join()).apply("S", CHAIN)
    reply = await scripts.call("join", "b", "a:1", "r", 4, os.urandom(8), 60_000, 64)
    assert reply[0] == b"OK"
    assert await matched(scripts) == {}


async def test_the_sweep_frees_slots_and_leaves_live_workers_alone(scripts: Scripts) -> None:
    pods = [await Pod(scripts, f"p{n:02}").join() for n in range(40)]
    for pod in pods:
        await pod.apply("S", CHAIN)
    for pod in pods[1:]:
        await scripts.call("leave", pod.name, pod.epoch)
    while (left := await scripts.call("sweep", 5)) != [0]:
        assert left[0] == 39
        assert await matched(scripts) == {"p00:1": 16}  # half swept slots appear in no match
    await pods[0].apply("R", CHAIN)
    assert await scripts.redis.execute("KEYS", scripts.prefix.replace("{", "\\{") + "[bw]*") == []
    reused = await Pod(scripts, "fresh").join()
    assert reused.slot == pods[1].slot
    assert await matched(scripts) == {}


async def test_a_slot_is_not_reused_before_it_is_swept(scripts: Scripts) -> None:
    seen = set()
    for _ in range(5):
        pod = await Pod(scripts, "a").join()
        assert pod.slot not in seen
        seen.add(pod.slot)
        await pod.apply("S", CHAIN)


async def test_every_key_carries_the_namespaces_tag(scripts: Scripts, server: RedisServer, namespace: str) -> None:
    pod = await Pod(scripts, "a").join()
    await pod.apply("S", CHAIN)
    await scripts.call("reserve", os.urandom(8), b"", b"+" + pod.slot + os.urandom(8) + struct.pack("<d", 64.0))
    await scripts.call("sweep", 10)
    mine = [key for key in server.client().keys("*") if namespace.encode() in key]
    assert mine and all(key.startswith(f"fl5:{{{namespace}}}:".encode()) for key in mine)


async def test_an_expired_lease_hides_a_slot_until_its_next_heartbeat(scripts: Scripts) -> None:
    silent, other = await Pod(scripts, "silent").join(lease_ms=400), await Pod(scripts, "other").join()
    await silent.apply("S", CHAIN)
    await other.apply("S", CHAIN[:3])

    async def hidden() -> bool:
        return await matched(scripts) == {"other:1": 3}

    await eventually(hidden)
    assert await silent.beat() == [b"OK", 0]
    assert await matched(scripts) == {"silent:1": 16, "other:1": 3}


async def test_buckets_split_as_blocks_grow_and_nothing_is_lost(scripts: Scripts) -> None:
    pods = [await Pod(scripts, name).join() for name in "ab"]
    chain = list(block_hashes(9, range(48_000), 4))  # 12,000 blocks in 2,000 runs, into 64 buckets of 16
    for end in range(600, len(chain) + 1, 600):
        for pod in pods:
            await pod.apply("S", chain[:end])
        assert await matched(scripts, chain) == {"a:1": end, "b:1": end}
    buckets = int(await scripts.redis.execute("HGET", scripts.key("meta"), "buckets"))
    assert 2000 / 16 <= buckets < 2000 / 16 + 8
    sizes = [await scripts.redis.execute("HLEN", scripts.key(b"b" + n.to_bytes(3, "big"))) for n in range(buckets)]
    assert sum(sizes) == 2000 == int(await scripts.redis.execute("HGET", scripts.key("meta"), "runs")) and max(sizes) < 128
    for pod in pods:
        await pod.apply("R", chain)
    assert await scripts.redis.execute("HGET", scripts.key("meta"), "runs") == b"0"


@either
async def test_the_count_of_runs_never_drifts_and_every_bucket_becomes_empty(scripts: Scripts, server: RedisServer) -> None:
    """This holds for any order of stores, removals, ends and sweeps, also in one batch, where prompts branch within a run, where buckets
    split and become empty. Each pod's blocks always match what it has sent."""
    chance = random.Random(7)
    trunk = [chance.getrandbits(64) for _ in range(40)]
    prompts = [trunk[: chance.randrange(40)] + [chance.getrandbits(64) for _ in range(chance.randrange(1, 200))] for _ in range(60)]
    pods = [await Pod(scripts, f"p{number}").join() for number in range(36)]
    following: dict[int, set[int]] = {block: set() for prompt in prompts for block in prompt}
    for prompt in prompts:
        for block, after in pairwise(prompt):
            following[block].add(after)
    told: dict[str, Changes] = {}

    def fresh(name: str) -> None:
        told[name] = Changes()
        told[name].restart()

    def store(pod: Pod) -> None:
        which = chance.randrange(len(prompts))
        depth = chance.randrange(1, len(prompts[which]) + 1)
        told[pod.name].store(prompts[which][:depth])

    def remove(pod: Pod) -> None:
        held, prompt, gone = set(told[pod.name].held), chance.choice(prompts), []
        for block in prompt[: chance.randrange(len(prompt)) : -1]:
            if block in held and not held & following[block]:
                gone.append(block)
                held.remove(block)
        told[pod.name].remove(gone)

    for pod in pods:
        fresh(pod.name)
        told[pod.name].store(prompts[0])  # more holders than a record lists
    client = server.client()

    def buckets() -> list[bytes]:
        return [key for key in client.keys("*") if key.startswith(scripts.key("b")) and len(key) == len(scripts.key("b")) + 3]

    for turn in range(150):
        pod = chance.choice(pods)
        for change in chance.choices([store, remove], k=8):
            change(pod)
        if turn % 7 == 0:
            await scripts.call("leave", pod.name, pod.epoch)
            pods[pods.index(pod)] = await Pod(scripts, pod.name).join()
            fresh(pod.name)
            continue
        assert await pod.tell(told[pod.name]) == [b"OK"]
        await scripts.call("sweep", chance.randrange(1, 400))
        assert sum(map(client.hlen, buckets())) == int(client.hget(scripts.key("meta"), "runs"))
        assert all(client.ttl(key) > 0 for key in buckets())
        which = chance.choice(prompts)
        expected = {}
        for each in pods:
            if not told[each.name].pending:
                held = set(told[each.name].held)
                depth = next((at for at, block in enumerate(which) if block not in held), len(which))
                expected[f"{each.name}:1"] = depth
        found = await matched(scripts, which)
        assert {name: found.get(name, 0) for name in expected} == expected
    for pod in pods:
        told[pod.name].remove(told[pod.name].held[::-1])
        await pod.tell(told[pod.name])
    while await scripts.call("sweep", 1000) != [0]:
        pass
    assert buckets() == [] and await scripts.redis.execute("HGET", scripts.key("meta"), "runs") == b"0"
    assert not [key for key in client.keys("*") if key.startswith(scripts.key("w"))]


async def test_a_resynced_worker_joins_again_with_its_next_heartbeat(scripts: Scripts) -> None:
    pod = await Pod(scripts, "a").join()
    await pod.apply("S", CHAIN)
    assert await scripts.call("recall", "b:1") == [b"UNKNOWN"]
    assert await scripts.call("recall", "a:1") == [b"OK"]
    assert await scripts.call("recall", "a:1") == [b"LATER"]
    await allow_recalls(scripts)
    assert await scripts.call("recall", "a:1") == [b"UNKNOWN"]  # a resync was requested already
    assert await pod.beat() == [b"STALE"] and await pod.apply("S", CHAIN[:1]) == [b"STALE"]
    assert await matched(scripts) == {}
    again = await Pod(scripts, "a").join()
    await again.apply("S", CHAIN[:3])
    assert await again.beat() == [b"OK", 1] and again.slot != pod.slot and await matched(scripts) == {"a:1": 3}
    assert await scripts.call("recall", "a:1") == [b"OK"]
    await scripts.call("leave", "a", again.epoch)
    assert await matched(scripts) == {} and await scripts.call("workers") == []


@pytest.mark.parametrize("skew_ms", [3_600_000, -3_600_000])
async def test_leases_from_another_clock_are_hidden_until_they_are_renewed(scripts: Scripts, server: RedisServer, skew_ms: int) -> None:
    """After a failover to a server whose clock is an hour off, dead workers must not appear alive, and live ones come back with their
    blocks."""
    dead, alive = await Pod(scripts, "dead").join(lease_ms=5_000), await Pod(scripts, "alive").join(lease_ms=5_000)
    for pod in (dead, alive):
        await pod.apply("S", CHAIN)
    await scripts.call("reserve", os.urandom(8), b"", b"+" + alive.slot + os.urandom(8) + struct.pack("<d", 64.0))
    shift_clock(server, scripts.prefix, skew_ms)
    assert await matched(scripts) == {} and await scripts.call("workers") == []
    assert await alive.beat(rate=1000) == [b"OK", 0]
    assert await matched(scripts) == {"alive:1": 16}
    [owed] = [row[5] for row in [await scripts.call("workers")]]
    assert float(owed) == 0  # a lease that ends an hour from now does not count


async def test_a_limited_match_finds_the_deepest_and_the_included_but_no_excluded_or_dead_workers(scripts: Scripts) -> None:
    pods = [await Pod(scripts, f"p{n:02}").join() for n in range(60)]
    for n, pod in enumerate(pods):
        await pod.apply("S", CHAIN[: 12 if n == 7 else 9 if n == 8 else 3])
    dead = await Pod(scripts, "ghost").join(lease_ms=1)
    await dead.apply("S", CHAIN)

    async def hidden() -> bool:
        return "ghost:1" not in await matched(scripts)

    await eventually(hidden)
    included = b"".join(pod.slot for pod in (pods[58], dead))
    found = await matched(scripts, CHAIN, 12, included, pods[8].slot)
    assert next(iter(found.items())) == ("p07:1", 12) and found["p58:1"] == 3
    assert 2 <= len(found) <= 13 and not {"p08:1", "ghost:1"} & found.keys()
