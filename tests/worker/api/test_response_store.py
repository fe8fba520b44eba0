"""Stored responses in Redis: bounds of each tenant and of all, encryption, and what happens while Redis fails."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from tests.servers.redis_server import RedisServer

from fairlead_common.response_keys import ResponseKeys, derive_keys, new_id
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff
from fairlead_worker.api import response_store
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.request_cpu import RequestCpu, UnreportedCpu
from fairlead_worker.api.response_store import ResponseStore, StoredResponse
from fairlead_worker.config.limits import Limits

SECRET = b"a secret that only routers have."
FREE = RequestCpu("", None)
Stores = Callable[..., ResponseStore]


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    server = RedisServer().start()
    yield server
    server.stop()


@pytest.fixture
def stores(own_redis: RedisServer) -> Stores:
    """Create stores as of several workers."""
    return lambda **limits: ResponseStore(RedisAccess(own_redis.url), "test/own", Limits(**limits), Backoff())


def keys_of(tenant: str, *ids: str) -> ResponseKeys:
    """Return what a router sends for a tenant."""
    return derive_keys(SECRET, tenant, *(ids or [new_id()]))


async def save(store: ResponseStore, keys: ResponseKeys, size: int = 0) -> bool:
    return await store.save(keys, StoredResponse({"id": keys.first_id}, ["x" * size]))


async def is_stored(store: ResponseStore, keys: ResponseKeys) -> bool:
    try:
        return bool(await store.load(keys.first_id, keys, FREE))
    except ApiError as error:
        assert error.status == 404
        return False


def key_of(server: RedisServer, name: str) -> bytes:
    (key,) = server.client().keys(f"*answers:{name}")
    return bytes(key)


async def test_no_tenant_makes_room_by_the_responses_of_another(stores: Stores) -> None:
    store = stores(stored_responses=4)
    anna, boris = [keys_of("anna") for _ in range(3)], [keys_of("boris") for _ in range(20)]
    for keys in (*anna, *boris):
        assert await save(store, keys)
    assert [await is_stored(store, keys) for keys in anna] == [True] * 3
    assert [await is_stored(store, keys) for keys in boris] == [False] * 16 + [True] * 4


async def test_bytes_of_a_tenant_and_of_all_are_bounded_and_a_new_tenant_finds_room(
    stores: Stores, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("MAX_TENANT_BYTES", 30_000), ("MAX_SERVICE_BYTES", 100_000)):
        monkeypatch.setattr(response_store, name, size)
    store, client = stores(), own_redis.client()
    stored: dict[str, list[ResponseKeys]] = {}
    for turn in range(64):
        tenant = f"tenant-{turn // 8}"
        keys = keys_of(tenant)
        if await save(store, keys, 4000):
            stored.setdefault(tenant, []).append(keys)
        held = client.hgetall(key_of(own_redis, "bytes"))
        sizes = [int(size) for tag, size in held.items() if tag]
        assert sum(sizes) == int(held[b""]) <= 100_000 and max(sizes) <= 30_000
    assert len(stored) == 4, "the others find no room, because nobody else makes it"
    assert not await save(store, keys_of("large"), 30_000)
    before = {tenant: [await is_stored(store, keys) for keys in all_keys] for tenant, all_keys in stored.items()}
    assert [answers[-1] for answers in before.values()] == [True] * len(stored)
    for _ in range(8):  # the first one shrinks to its share as soon as it stores again, and so a new one finds room
        assert await save(store, keys_of("tenant-0"), 4000)
    assert await save(store, keys_of("newcomer"), 4000)
    for tenant in set(stored) - {"tenant-0"}:
        assert [await is_stored(store, keys) for keys in stored[tenant]] == before[tenant], "untouched"


async def test_a_large_response_is_not_stored(stores: Stores) -> None:
    store, keys = stores(), keys_of("anna")
    assert not await save(store, keys, response_store.MAX_RESPONSE_BYTES)
    assert not await is_stored(store, keys)


async def test_loading_costs_its_cpu_time(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_RESPONSE_BYTES", 8 << 20)
    store, keys, cpu = stores(), keys_of("anna"), RequestCpu("anna", UnreportedCpu())
    assert await store.save(keys, StoredResponse({"id": keys.first_id}, [{"role": "user", "content": ""}] * 50_000))
    await store.load(keys.first_id, keys, cpu)
    ((_, milliseconds),) = cpu.report()
    assert int(milliseconds) > 0


async def test_deleted_and_expired_responses_leave_the_accounts(stores: Stores, own_redis: RedisServer) -> None:
    store, client = stores(), own_redis.client()
    old = [keys_of("anna") for _ in range(3)]
    for keys in old:
        assert await save(store, keys)
    await store.delete(old[0].first_id, old[0], FREE)
    assert len(client.keys("*answers:r*")) == client.zcard(key_of(own_redis, "all")) == 2
    for ring in client.keys("*answers:all") + client.keys("*answers:t*"):
        for member in client.zrange(ring, 0, -1):
            client.zadd(ring, {member: 1})  # they ended in 1970
    latest = keys_of("boris")
    assert await save(store, latest)
    assert [await is_stored(store, keys) for keys in (*old, latest)] == [False] * 3 + [True]
    assert len(client.keys("*answers:r*")) == 1 and len(client.hgetall(key_of(own_redis, "bytes"))) == 2
    await store.delete(latest.first_id, latest, FREE)
    assert client.hgetall(key_of(own_redis, "bytes")) == {b"": b"0"} and not client.keys("*answers:t*")


async def test_a_request_that_is_repeated_at_another_worker_is_stored_once(stores: Stores, own_redis: RedisServer) -> None:
    one, other, keys = stores(), stores(), keys_of("anna")
    assert await save(one, keys, 10) and await save(other, keys, 2000)
    assert len((await one.load(keys.first_id, keys, FREE)).input[0]) == 2000
    assert own_redis.client().zcard(key_of(own_redis, "all")) == 1


async def test_redis_holds_no_text_id_or_tenant_and_gives_nothing_for_other_keys(stores: Stores, own_redis: RedisServer) -> None:
    store, client = stores(), own_redis.client()
    keys = keys_of("anna")
    assert await store.save(keys, StoredResponse({"id": keys.first_id}, ["a secret conversation"]))
    seen = b""
    for key in client.keys("*answers*"):
        seen += key + repr(client.hgetall(key) if client.type(key) == b"hash" else client.zrange(key, 0, -1)).encode()
    for known in (b"secret conversation", keys.first_id[5:].encode(), b"anna", keys.keys[keys.first_id].hex().encode()):
        assert known not in seen
    for other in (keys_of("boris", keys.first_id), keys_of("", keys.first_id), derive_keys(b"x" * 32, "anna", keys.first_id)):
        assert not await is_stored(store, other)
    assert await is_stored(store, keys)


async def test_a_record_that_was_forged_changed_or_moved_is_not_found(stores: Stores, own_redis: RedisServer) -> None:
    """A worker's Redis credential can write all this. It has no keys of requests that other workers served."""
    store, client = stores(), own_redis.client()
    anna, boris = keys_of("anna"), keys_of("boris")
    assert await save(store, anna)
    (first,) = client.keys("*answers:r*")
    assert await save(store, boris)
    second = next(key for key in client.keys("*answers:r*") if key != first)
    text = client.hget(first, "text")
    changed = text[:-1] + bytes([text[-1] ^ 1])
    for forged in (client.hget(second, "text"), changed, text[:5], b"", b'{"response":{},"input":[]}', text + b"x"):
        client.hset(first, "text", forged)
        assert not await is_stored(store, anna), forged
    client.hset(first, "text", text)
    assert await is_stored(store, anna)
    client.delete(first)
    client.set(first, "of another type")
    with pytest.raises(ApiError) as refused:
        await store.load(anna.first_id, anna, FREE)
    assert refused.value.status == 503
    for ring in client.keys("*answers:all") + client.keys("*answers:t*"):
        client.zadd(ring, {"forged": 1})
    assert await save(store, keys_of("anna")), "forged accounts do not end storing"


async def test_after_a_failure_no_request_waits_for_redis_until_the_backoff_is_over() -> None:
    now, server = [0.0], RedisServer().start()
    store = ResponseStore(RedisAccess(server.url), "test/hung", Limits(), Backoff(10.0, 40.0, clock=lambda: now[0]))
    try:
        keys, more = keys_of("anna"), keys_of("anna")
        assert await save(store, keys)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert not await save(store, more)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert not await save(store, more), "Redis answers again, but is not asked yet"
        with pytest.raises(ApiError, match="Redis does not answer") as refused:
            await store.load(keys.first_id, keys, FREE)
        assert refused.value.status == 503
        now[0] = 10.0
        assert await is_stored(store, keys)
        assert await save(store, more)
    finally:
        server.stop()


async def test_at_maxmemory_nothing_is_stored_and_stored_responses_are_read_and_deleted(stores: Stores, own_redis: RedisServer) -> None:
    store, first, second = stores(), keys_of("anna"), keys_of("anna")
    assert await save(store, first)
    own_redis.command("CONFIG", "SET", "maxmemory", "1")
    assert not await save(store, second)
    assert await is_stored(store, first)
    await store.delete(first.first_id, first, FREE)
    assert not await is_stored(store, first)
    own_redis.command("CONFIG", "SET", "maxmemory", "0")
    assert await save(store, second)
