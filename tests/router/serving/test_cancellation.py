"""Clients disconnect and workers fail at any moment: nothing stays counted, held, reserved or charged."""

import asyncio
import random
from pathlib import Path

import pytest
from tests.router.harness import Fleet, RunningRouter, eventually, post
from tests.router.stand_in_worker import Behaviour, Exchange, StandIn, answers
from tests.router.tenancy.test_access import ANNA, key_file
from tests.servers.redis_server import RedisServer

from fairlead_index.reader import IndexReader

MAX_SECONDS = 0.12
CLIENTS, WAVES = 80, 3


def random_faults(seed: int) -> Behaviour:
    """A worker that answers late, dies, refuses, or streams slowly, at random."""
    chance = random.Random(seed)

    async def behave(exchange: Exchange) -> None:
        kind = chance.choice(("at once", "late", "late", "dies", "refuses", "full", "breaks off"))
        await asyncio.sleep(chance.random() * MAX_SECONDS / 2)  # the worker's own delay, not a synchronisation
        if kind == "dies":
            exchange.die()
        elif kind == "refuses":
            await exchange.whole(503, {"error": {"message": "draining"}}, x_fairlead_retry="other")
        elif kind == "full":
            await exchange.whole(429, {"error": {"message": "full"}}, x_fairlead_retry="other", retry_after="1")
        elif kind == "breaks off":
            await exchange.head()
            await exchange.event("half")
            exchange.die()
        else:
            await answers(exchange)

    return behave


async def one_client(router: RunningRouter, chance: random.Random, headers: tuple[str, ...]) -> None:
    """Send a request, whole or in part, and disconnect after a random time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    try:
        sent = post({"model": "stand-in", "prompt": "word " * chance.randrange(1, 400), "stream": chance.random() < 0.7}, "1.1", *headers)
        writer.write(sent if chance.random() < 0.85 else sent[: chance.randrange(len(sent))])
        if chance.random() < 0.15:
            writer.write(sent)  # a pipelined request
        async with asyncio.timeout(chance.random() * MAX_SECONDS):
            while await reader.read(4096):
                pass
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()


def nonzero_counters(router: RunningRouter) -> dict[str, float]:
    """Return the counters that are not zero although there are no requests."""
    parts, server = router.server.router, router.server
    queue, bodies = parts.admission._queue, parts.handler.body_budget
    counts: dict[str, float] = {
        "bodies": bodies.total,
        "tenants with bodies": len(bodies._each),
        "queued": queue.total.count,
        "queued bytes": queue.total.size,
        "queued tokens": queue.total.tokens,
        "accounts in the queue": len(queue._by_account),
        "granted": parts.admission._granted,
        "unbegun": parts.admission._num_unanswered,
        "requests under way": len(server._running_tasks()),
        "connections": max(0, len(server._connections) - 1),  # the test's own client keeps one
        "guarded": max(0, len(server._limiter) - 1),
    }
    for worker in router.table:
        counts[f"in flight at {worker.pod}"] = worker.in_flight
        counts[f"prompts at {worker.pod}"] = worker.pending_prompts
        counts[f"pending at {worker.pod}"] = worker.pending_tokens
    return {what: count for what, count in counts.items() if count}


async def run_waves(workers: list[StandIn], router: RunningRouter, seed: int, *headers: str) -> None:
    """Run waves of clients; in the last wave there are moments without any worker."""
    chance = random.Random(seed)
    for wave in range(WAVES):
        clients = [asyncio.create_task(one_client(router, chance, headers)) for _ in range(CLIENTS)]
        if wave == WAVES - 1:
            for worker in workers:
                worker.ready = False
            await eventually(lambda: not router.table.usable(), "no worker is ready")
            clients += [asyncio.create_task(one_client(router, chance, headers)) for _ in range(CLIENTS)]
            await asyncio.wait(clients, timeout=MAX_SECONDS / 2)
            for worker in workers:
                worker.ready = True
        await asyncio.gather(*clients)
    for worker in workers:
        worker.behaviour = answers
    await router.usable(len(workers))
    await eventually(lambda: not nonzero_counters(router), "all counts are zero", 15)
    credentials = dict(header.split(": ", 1) for header in headers)
    answer = await router.client.post("/v1/completions", json={"model": "stand-in", "prompt": "x"}, headers=credentials)
    assert answer.status_code == 200
    await eventually(lambda: not nonzero_counters(router), "all counts are zero again", 15)


@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_stays_counted_after_clients_disconnect(fleet: Fleet, tmp_path: Path, seed: int) -> None:
    workers = [await fleet.worker(behaviour=random_faults(seed + number)) for number in range(3)]
    keys = tmp_path / "keys.yaml"
    keys.write_text(key_file({"anna": {}}))
    settings: dict = {"api_keys_file": str(keys)} if seed == 2 else {}
    router = await fleet.router(*workers, policy="LeastLoad", **settings)
    await run_waves(workers, router, seed, *([f"authorization: Bearer {ANNA}"] if seed == 2 else []))


@pytest.mark.parametrize("mode", ["remote", "mirror"])
async def test_nothing_stays_reserved_after_clients_disconnect(fleet: Fleet, mode: str) -> None:
    """Covers what the router itself releases: these workers report no load, which would end any reservation it forgot."""
    with RedisServer() as redis:
        where = (redis.url, "tests/cancel")
        workers = [await fleet.worker(behaviour=random_faults(number), redis=where, reports=False, lease=30) for number in range(3)]
        await eventually(lambda: all(worker.joined for worker in workers), "the workers joined")
        router = await fleet.router(*workers, redis_url=redis.url, index_namespace=where[1], index_mode=mode)
        reader = IndexReader(*where, deadline=5)
        try:
            await run_waves(workers, router, 3)

            async def released() -> bool:
                return all(state.reserved_tokens == 0 for state in await reader.workers())

            assert len(await reader.workers()) == 3
            await eventually(released, "no reservation is left in the index", 5)
        finally:
            await reader.close()
