"""Limits of an attacker with a worker's Redis credential: it can only degrade the routing of its own service."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.stand_in_worker import StandIn
from tests.servers.redis_server import RedisServer, installed_versions

from fairlead_index.changes import Changes, pack
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.access_rules import ensure_user, user_name
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.connection import ReplyError
from fairlead_index.redis.scripts import Scripts, key_prefix
from fairlead_router.fleet.trust import Trust
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.metrics import Metrics

A, B = "prod/a", "prod/b"
REQUESTS = 10_000
CLIENTS = 8  # of each router
PROMPTS = 24
PERFECT = (0, 0, 0, 1e9, 0, 1_000_000, 1_000_000, 16, 0)
"""A load better than any real one: running, waiting, backlog, rate, step time, free pages, total pages, page size, arrivals a second."""


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer(installed_versions()[-1]) as server:
        yield server


@pytest.fixture
async def admin(redis: RedisServer) -> AsyncIterator[RedisClient]:
    client = RedisClient(RedisAccess(redis.url), 5.0)
    yield client
    await client.close()


async def user(redis: RedisServer, admin: RedisClient, role: str, namespace: str, folder: Path) -> RedisAccess:
    """Create a user of that role, as the operator does."""
    name = await ensure_user(admin, role, namespace, [hashlib.sha256(b"secret").hexdigest()])  # type: ignore[arg-type]
    own = folder / name.replace("/", "-")
    own.mkdir(exist_ok=True)
    (own / "username").write_text(name)
    (own / "password").write_text("secret")
    return RedisAccess(redis.url, str(own))


class LosesItsCache(StandIn):
    """A worker that keeps nothing: every prediction of the index about its cache is wrong."""

    def computed(self, tokens: int, hashes: Sequence[int]) -> None:
        self.backlog -= tokens


class Attacker:
    """An attacker with the credential of one service's worker, who knows its prompts and runs a server."""

    def __init__(self, access: RedisAccess, namespace: str, trap: str, victims: Sequence[StandIn]) -> None:
        self._scripts, self._trap, self._victims = Scripts(access, namespace, timeout=5.0), trap, victims
        self.rounds = Counter[str]()

    async def join(self, pod: str, address: str, blocks: Sequence[Sequence[int]]) -> None:
        """Write a record of its own with a perfect load that claims all prompts."""
        epoch = os.urandom(8)
        _, slot = await self._scripts.call("join", pod, address, "r", 16, epoch, 60_000, 64)
        await self._store(slot, epoch, 1, blocks)
        await self._scripts.call("heartbeat", slot, epoch, 1, 0, *PERFECT)

    async def _store(self, slot: bytes, epoch: bytes, sequence: int, blocks: Sequence[Sequence[int]]) -> None:
        changes = Changes()
        changes.restart()
        for hashes in blocks:
            changes.store(hashes)
        await self._scripts.call("apply", slot, epoch, sequence, *pack(changes.take(10**6)))

    async def honest_slots(self) -> dict[bytes, bytes]:
        """Return the records of `live` by slot."""
        key = self._scripts.key("live")
        flat = await self._scripts.redis.execute("HGETALL", key)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def store_for_others(self, blocks: Sequence[Sequence[int]]) -> None:
        """Write placements under an honest worker's fence and restore the fence: the real writer notices nothing."""
        for slot, record in (await self.honest_slots()).items():
            if any(victim.address.encode() in record for victim in self._victims):
                fence = await self._scripts.redis.execute("HGET", self._scripts.key("meta"), b"f" + slot)
                if fence:
                    epoch, sequence = struct.unpack("<8sd", fence)
                    await self._store(slot, epoch, int(sequence) + 1, blocks)
                    await self._scripts.redis.execute("HSET", self._scripts.key("meta"), b"f" + slot, fence)

    async def steal_slots(self) -> None:
        """Overwrite the address in honest workers' records, and the slot names of that address."""
        for slot, record in (await self.honest_slots()).items():
            for victim in self._victims:
                old = victim.address.encode()
                if old in record:
                    trap = self._trap.encode()
                    at = record.index(old)
                    forged = record[: at - 2] + struct.pack("<H", len(trap)) + trap + record[at + len(old) :]
                    await self._scripts.redis.execute("HSET", self._scripts.key("live"), slot, forged)
                    await self._scripts.redis.execute("HSET", self._scripts.key("names"), b"a" + trap, slot)

    async def replay_leases(self) -> None:
        leases = await self._scripts.redis.execute("GET", self._scripts.key("leases")) or b""
        await self._scripts.redis.execute("SETRANGE", self._scripts.key("leases"), 0, leases)

    async def forge_log(self) -> None:
        told = await self._scripts.redis.execute("HGET", self._scripts.key("meta"), "told") or b"0-0"
        number, trap = int(told.split(b"-")[0]) + 1, self._trap.encode()
        record = b"J\0\1" + struct.pack("<d8sdH", 60_000.0, os.urandom(8), 16, len(trap)) + trap
        with contextlib.suppress(ReplyError):  # The worker publishes an event at the same time.
            await self._scripts.redis.execute("XADD", self._scripts.key("log"), f"{number}-1", "r", record)

    async def try_another_service(self, namespace: str) -> None:
        prefix = key_prefix(namespace)
        other = Scripts(self._scripts.redis._access, namespace, timeout=5.0)
        try:
            for command in (("HGETALL", prefix + "live"), ("HSET", prefix + "live", "x", "y"), ("DEL", prefix + "meta")):
                with pytest.raises(ReplyError, match=r"(?i)perm"):
                    await other.redis.execute(*command)
            with pytest.raises(ReplyError, match=r"(?i)perm"):
                await other.call("join", "evil", self._trap, "r", 16, os.urandom(8), 60_000, 64)
            for role in ("router", "worker"):
                with pytest.raises(ReplyError, match=r"(?i)perm"):
                    await other.redis.execute("ACL", "SETUSER", user_name(role, namespace), "nopass")  # type: ignore[arg-type]
        finally:
            await other.close()

    async def attack(self, blocks: Sequence[Sequence[int]]) -> None:
        """Run all attacks in a loop."""
        for number in itertools.count():
            await self.join(f"evil{number % 12}", self._trap, blocks)
            await self.join(f"twin{number % 3}", f"127.0.0.1:{1 + number % 60000}", blocks)
            if number % 8 == 0:
                await self.join("thief", self._victims[number % len(self._victims)].address, blocks)
            if number % 8 == 4:
                await self.steal_slots()
            await self.store_for_others(blocks)
            await self.replay_leases()
            await self.forge_log()
            if number % 4 == 0:
                await self.try_another_service(B)
            self.rounds["all"] += 1
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._scripts.close()


def prompt(service: str, number: int) -> str:
    return f"{service} asks for something, number {number} of them, and goes on about it for a while"


async def count_ignored(router: RunningRouter) -> float:
    return await router.metric("fairlead_router_ignored_records_total")


async def count_wrong(router: RunningRouter) -> float:
    """Return what the audit of the index found."""
    return await router.metric("fairlead_router_worker_prediction_error_ratio") + await router.metric("fairlead_router_recalls_total")


async def ask(port: int, service: str, numbers: Iterator[int], pods: Counter[str]) -> None:
    """Send requests over one connection, one for each number. Asserts that every answer is a 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in numbers:
        body = json.dumps({"model": "stand-in", "prompt": prompt(service, number % PROMPTS)}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        await reader.readexactly(int(fields["content-length"]))
        assert head.startswith("http/1.1 200"), head
        pods[fields["x-fairlead-pod"]] += 1
    writer.close()


async def test_a_workers_credential_can_only_degrade_routing_of_its_own_service(
    fleet: Fleet, redis: RedisServer, admin: RedisClient, tmp_path: Path
) -> None:
    services: dict[str, list[StandIn]] = {}
    for namespace in (A, B):
        access = await user(redis, admin, "worker", namespace, tmp_path)
        services[namespace] = []
        for number in range(3):
            worker = LosesItsCache(pod=f"{namespace[-1]}{number}", redis=(access, namespace), lease=2.0)  # type: ignore[arg-type]
            services[namespace].append(await worker.start())
            fleet.workers.append(worker)
            fleet._stack.push_async_callback(worker.kill)
    trap = await fleet.worker(pod="trap")
    routers: list[tuple[RunningRouter, str]] = []
    for namespace, mode in itertools.product((A, B), ("remote", "mirror")):
        access = await user(redis, admin, "router", namespace, tmp_path)
        settings = {"redis_url": redis.url, "redis_credentials": access.credentials}
        router = await fleet.router(*services[namespace], index_namespace=namespace, index_mode=mode, **settings)
        routers.append((router, namespace))
    redis.command("ACL", "SETUSER", "default", "off")
    await eventually(lambda: all(worker.joined for workers in services.values() for worker in workers), "they joined the index")

    encoder = routers[0][0].server.router.formats.current.encoder  # type: ignore[union-attr]
    tokens = [encoder.encode_text(prompt("a", number)) for number in range(PROMPTS)]
    blocks = [block_hashes(prompt_root(trap.format), each, 16) for each in tokens]
    assert all(len(each) > 2 for each in blocks)
    attacker = Attacker(RedisAccess(redis.url, str(tmp_path / user_name("worker", A).replace("/", "-"))), A, trap.address, services[A])
    attack = asyncio.create_task(attacker.attack(blocks))
    try:
        pods: dict[str, Counter[str]] = {A: Counter(), B: Counter()}
        asking = []
        for router, namespace in routers:
            numbers = iter(range(REQUESTS // len(routers)))
            asking += [ask(router.port, namespace[-1], numbers, pods[namespace]) for _ in range(CLIENTS)]
        await asyncio.gather(*asking)
        async with asyncio.timeout(60):  # on a busy machine, a router may have gone without the index for all of them
            for router, namespace in routers:
                while namespace == A and not (await count_ignored(router) and await count_wrong(router)):
                    await ask(router.port, "a", iter(range(20)), Counter())
        assert not attack.done(), attack.exception()
    finally:
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
        await attacker.close()

    assert attacker.rounds["all"] > 20
    assert sum(count for counter in pods.values() for count in counter.values()) == REQUESTS
    assert not trap.received, "no request goes to an address that discovery does not name"
    for namespace, workers in services.items():
        assert set(pods[namespace]) <= {worker.pod for worker in workers}
        assert all(one.json["prompt"].startswith(f"{namespace[-1]} ") for worker in workers for one in worker.received)
    for router, namespace in routers:
        shown = (await router.client.get("/fairlead/workers")).json()["ignored_records"]
        if namespace == A:
            assert any(one["address"] == trap.address and one["reason"] == "unknown_address" for one in shown)
        else:
            assert not shown and not await count_wrong(router), "another service is not affected"


class RecordForger:
    """Writes records by hand, with full rights."""

    def __init__(self, url: str, namespace: str) -> None:
        self.scripts = Scripts(url, namespace, timeout=5.0)

    async def join(self, pod: str, address: str, load: tuple[float, ...] = PERFECT) -> None:
        epoch = os.urandom(8)
        _, slot = await self.scripts.call("join", pod, address, "r", 16, epoch, 60_000, 64)
        await self.scripts.call("heartbeat", slot, epoch, 0, 0, *load)


@pytest.mark.parametrize("mode", ["remote", "mirror"])
async def test_a_worker_is_used_only_when_discovery_names_it(fleet: Fleet, redis: RedisServer, mode: str) -> None:
    index = (redis.url, A)
    known, newer = await fleet.worker(redis=index), await fleet.worker(redis=index)
    await eventually(lambda: known.joined and newer.joined, "they joined the index")
    settings = {"redis_url": redis.url, "index_namespace": A, "index_mode": mode}
    router = await fleet.router(known, workers=fleet.list_in_file(known), poll_interval=60.0, **settings)
    for number in range(20):
        assert (await router.complete(f"{number} asks")).headers["x-fairlead-pod"] == known.pod
    assert not newer.received
    page = (await router.client.get("/fairlead/workers")).json()
    assert [one["address"] for one in page["workers"]] == [known.address]

    def unknown() -> list[object]:
        recent = router.server.router.policy.trust.recent()  # type: ignore[union-attr]
        return [one["address"] for one in recent if one["reason"] == "unknown_address"]

    await eventually(lambda: unknown() == [newer.address], "it is shown, and it alone")
    fleet.list_in_file(known, newer)
    began = asyncio.get_running_loop().time()
    while router.table.get(newer.address) is None:  # a request that meets the worker's record triggers a discovery poll
        await router.complete("x" * 40)
    assert asyncio.get_running_loop().time() - began < 30.0, "long before the next poll"
    await router.usable(2)
    await eventually(lambda: not unknown(), "its record is no longer shown as ignored")


async def test_a_worker_that_joined_again_is_trusted_within_one_poll(fleet: Fleet, redis: RedisServer) -> None:
    worker = await fleet.worker(redis=(redis.url, A), reports=False)
    await eventually(lambda: worker.joined, "it joined the index")
    router = await fleet.router(worker, redis_url=redis.url, index_namespace=A, index_mode="remote", poll_interval=20.0)
    assert "x-fairlead-predicted-tokens" in (await router.complete("a" * 40)).headers
    assert worker._index is not None
    before = worker._index.incarnation
    redis.command("FLUSHALL")
    await eventually(lambda: worker.joined and worker._index.incarnation != before, "it joined again")  # type: ignore[union-attr]
    await asyncio.sleep(0.1)  # MIN_CHECK_INTERVAL_SECONDS after the last poll

    async def is_routed_there() -> bool:
        return "x-fairlead-predicted-tokens" in (await router.complete("a" * 40)).headers

    await eventually(is_routed_there, "the index is used again", 2.0)


@pytest.mark.parametrize("mode", ["remote", "mirror"])
async def test_forged_perfect_records_do_not_hide_the_holder_of_a_prompt(fleet: Fleet, redis: RedisServer, mode: str) -> None:
    workers = [await fleet.worker(redis=(redis.url, A), lease=60.0) for _ in range(3)]
    await eventually(lambda: all(worker.joined for worker in workers), "they joined the index")
    router = await fleet.router(*workers, redis_url=redis.url, index_namespace=A, index_mode=mode)
    talk = "somebody says something " * 10
    await router.complete(talk)
    forger = RecordForger(redis.url, A)
    for number in range(24):  # three lists of candidates
        await forger.join(f"evil{number}", f"10.9.9.{number}:1")
    await forger.scripts.close()

    async def goes_to_holder() -> bool:
        answer = await router.complete(talk)
        assert answer.headers["x-fairlead-pod"] in {worker.pod for worker in workers}
        return int(answer.headers.get("x-fairlead-predicted-tokens", 0)) > 0

    # While forged records fill every answer of the index, another worker may get the first request and compute the prompt.
    await eventually(goes_to_holder, "the conversation is routed to a holder", 5.0)
    answers = await asyncio.gather(*(router.complete(talk + str(number)) for number in range(20)))
    routed = [one for one in answers if int(one.headers.get("x-fairlead-predicted-tokens", 0)) > 0]
    assert len(routed) >= 12, "known forged records are excluded from the start"


async def test_the_set_of_ignored_records_is_bounded() -> None:
    table = WorkerTable()
    table.set_addresses(["10.0.0.1:1"])
    metrics, asked = Metrics(table), [0]

    def resolve() -> None:
        asked[0] += 1

    trust = Trust(table, metrics.ignored_records, resolve)
    for number in range(1000):
        assert not trust(f"10.1.{number // 250}.{number % 250}:1" * 20, "00")
    assert len(trust.recent()) == 128 and asked[0] == 1000
    assert all(len(one["address"]) <= 200 for one in trust.recent())


async def test_a_record_of_a_worker_before_its_first_poll_is_not_reported() -> None:
    table = WorkerTable()
    table.set_addresses(["10.0.0.1:1"])
    worker, metrics = next(iter(table)), Metrics(table)
    trust = Trust(table, metrics.ignored_records, lambda: None)
    assert not trust("10.0.0.1:1", "aa") and not trust.recent(), "a router that has just started"
    worker.reason = ""
    assert not trust("10.0.0.1:1", "") and not trust("10.0.0.1:1", "aa")
    assert [one["reason"] for one in trust.recent()] == ["other_incarnation"]
    worker.incarnation = "aa"
    assert trust("10.0.0.1:1", "aa") and not trust("10.0.0.1:1", "ab")


async def test_a_crash_soon_after_the_start_is_not_counted_from_the_start_on() -> None:
    """Otherwise `status` would warn of a forged record seconds after a worker has ended."""
    table, now = WorkerTable(), [0.0]
    trust = Trust(table, Metrics(table).ignored_records, lambda: None, lambda: now[0])
    assert not trust("10.0.0.1:1", "aa"), "the index is faster than discovery"
    table.set_addresses(["10.0.0.1:1"])
    next(iter(table)).incarnation = "aa"
    now[0] = 10.0
    assert trust("10.0.0.1:1", "aa")
    table.set_addresses([])
    now[0] = 40.0
    assert not trust("10.0.0.1:1", "aa")
    now[0] = 41.0
    assert [one["seconds"] for one in trust.recent()] == [1.0]


async def test_query_and_redirect_never_name_an_undiscovered_address(fleet: Fleet, redis: RedisServer) -> None:
    worker = await fleet.worker(redis=(redis.url, A))
    await eventually(lambda: worker.joined, "it joined the index")
    settings = {"redis_url": redis.url, "index_namespace": A, "forwarding_mode": "redirect", "index_mode": "remote"}
    router = await fleet.router(worker, **settings)
    tokens = list(range(64))
    hashes = block_hashes(prompt_root(worker.format), tokens, 16)
    attacker = Attacker(RedisAccess(redis.url), A, "10.9.9.9:1", [worker])
    await attacker.join("evil", "10.9.9.9:1", [hashes])
    await attacker.store_for_others([hashes])
    found = (await router.client.post("/query", json={"model": "stand-in", "token_ids": tokens})).json()
    assert set(found["instances"]) == {worker.address} and found["instances"][worker.address]["longest_matched"] == 64
    for _ in range(10):
        answer = await router.client.post("/v1/completions", json={"model": "stand-in", "prompt": "hello"}, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, f"http://{worker.address}/v1/completions")
    await attacker.close()
