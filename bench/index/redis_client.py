"""The index's Redis client, shared and pooled, beside redis-py's own Redis and RedisCluster.

Microseconds of time and of CPU for each call, with one caller and with 64 concurrent callers: the median of the rounds, and the range of
the ratios to the shared connection. All clients run the same script on the same server, in turns, on uvloop as in the router.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from hashlib import sha1

import uvloop
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from tests.servers.redis_cluster import RedisCluster as Servers
from tests.servers.redis_server import VERSIONS, binary

from bench.common.report import make_parser, write_report
from fairlead_index.hashing import block_hashes, hash_bytes
from fairlead_index.redis.scripts import Scripts, script_source

CALLS = 2000
HASHES = hash_bytes(block_hashes(7, range(64 * 64), 64))
CALLERS = (1, 64)
Call = Callable[[], Awaitable[object]]


async def microseconds(call: Call, callers: int) -> tuple[float, float]:
    """Return microseconds of time and of this process's CPU per call, with `callers` concurrent callers."""

    async def caller() -> None:
        for _ in range(CALLS // callers):
            await call()

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(callers)))
    scale = 1e6 / (CALLS // callers * callers)
    return (time.perf_counter() - began) * scale, (time.process_time() - cpu) * scale


async def measure(rounds: int) -> dict[str, object]:
    version = next(version for version in reversed(VERSIONS) if binary(version))
    with Servers(version) as servers:
        shared = Scripts(servers.url, "bench/client", timeout=5, shared=True)
        pooled = Scripts(servers.url, "bench/client", timeout=5)
        await shared.call("join", "a", "a:1", "r", 64, os.urandom(8), 600_000, 64)
        home = servers.owner(shared.prefix).port
        source = script_source("match")
        pool = BlockingConnectionPool.from_url(f"redis://127.0.0.1:{home}", max_connections=64, timeout=5, retry=Retry(NoBackoff(), 0))
        plain = Redis.from_pool(pool)
        cluster = RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", node.port) for node in servers.nodes], max_connections=64)
        await plain.script_load(source)
        asked = (sha1(source.encode()).hexdigest(), 2, shared.prefix, shared.prefix + "meta", HASHES)
        ways: dict[str, Call] = {
            "RedisClient, shared": lambda: shared.redis.execute("EVALSHA", *asked),
            "RedisClient, pool of 4": lambda: pooled.redis.execute("EVALSHA", *asked),
            "redis-py, pool of 64": lambda: plain.execute_command("EVALSHA", *asked),  # type: ignore[no-untyped-call]
            "redis-py RedisCluster": lambda: cluster.execute_command("EVALSHA", *asked),
        }
        found: dict[str, dict[int, list[tuple[float, float]]]] = {name: {n: [] for n in CALLERS} for name in ways}
        for call in ways.values():
            await microseconds(call, 1)  # connections
        for _ in range(rounds):
            for callers in CALLERS:
                for name, call in ways.items():
                    found[name][callers].append(await microseconds(call, callers))
        await shared.close()
        await pooled.close()
        await plain.aclose()
        await cluster.aclose()
    print(f"{version}, {rounds} rounds of {CALLS} calls: us of time, us of CPU, and their ratios to the shared connection")
    report: dict[str, object] = {}
    for name, rounds_of in found.items():
        report[name] = {}
        for n in CALLERS:
            medians = [statistics.median(each[kind] for each in rounds_of[n]) for kind in (0, 1)]
            ratios = [
                sorted(theirs[kind] / ours[kind] for theirs, ours in zip(rounds_of[n], found["RedisClient, shared"][n], strict=True))
                for kind in (0, 1)
            ]
            spread = "; ".join(f"{each[0]:.1f} to {each[-1]:.1f}" for each in ratios)
            print(f"{name:24}{n:3} callers {medians[0]:7.0f} {medians[1]:7.0f}   {spread}")
            report[name] |= {f"{n}_callers_us": medians[0], f"{n}_callers_cpu_us": medians[1], f"{n}_callers_ratios": ratios}  # type: ignore[operator]
    return report


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    result = uvloop.run(measure(options.rounds))
    write_report(__name__, options, result)
