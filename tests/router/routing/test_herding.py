"""A burst of one cold prefix through several routers: it spreads in every index mode, and without the index.

The burst is quicker than the workers' load reports: to the routers all workers stay idle until it is over.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.router.harness import Fleet, eventually
from tests.router.stand_in_worker import answers_when_all_have_come
from tests.servers.redis_server import RedisServer

from fairlead_router.routing.prefix_aware import PrefixAware

ROUTERS, WORKERS, REQUESTS = 4, 8, 256
PREFIX = "a system prompt that nobody has seen before, " * 40


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.mark.parametrize("away", [False, True], ids=["with redis", "redis away"])
@pytest.mark.parametrize("mode", ["remote", "mirror"])
async def test_a_burst_of_one_cold_prefix_spreads(redis: RedisServer, fleet: Fleet, mode: str, away: bool) -> None:
    together = answers_when_all_have_come(REQUESTS)
    load = {"backlog_tokens": 0, "pages_free": 100_000, "pages_total": 100_000, "page_size": 16}
    workers = [await fleet.worker(redis=(redis.url, "tests/herd"), behaviour=together, load=load, lease=60.0) for _ in range(WORKERS)]
    await eventually(lambda: all(worker.joined for worker in workers), "the workers joined the index")
    routers = [await fleet.router(*workers, redis_url=redis.url, index_namespace="tests/herd", index_mode=mode) for _ in range(ROUTERS)]
    policies = [router.server.router.policy for router in routers]
    for policy in policies:
        assert isinstance(policy, PrefixAware)
        await eventually(lambda: policy.read_mode == mode, "the index is read as wanted")  # noqa: B023 (awaited here)
    for worker in workers:
        worker.reports = False
    if away:
        redis.kill()
    sent = [routers[number % ROUTERS].complete(f"{PREFIX} {number}", user=str(number), stream=True) for number in range(REQUESTS)]
    done = await asyncio.gather(*sent)
    if away:
        redis.start()  # so that workers and routers leave it at once
    assert {answer.status_code for answer in done} == {200}
    taken = Counter(answer.headers["x-fairlead-pod"] for answer in done)
    assert max(taken.values()) <= 1.3 * REQUESTS / WORKERS, taken
