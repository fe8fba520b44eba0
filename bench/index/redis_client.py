"""Latency of the index's Redis client beside redis-py's pool and redis-py's RedisCluster.

Microseconds of a call with one caller and with 64 concurrent callers: the median of the rounds and the range of the ratios. All clients run
the same script on the same server, in turns.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from hashlib import sha1

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
Call = Callable[[], Awaitable[object]]


async def microseconds(call: Call, callers: int) -> float:
    """Return the microseconds per call with `callers` concurrent callers."""

    async def caller() -> None:
        for _ in range(CALLS // callers):
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return (time.perf_counter() - began) / (CALLS // callers * callers) * 1e6


async def measure(rounds: int) -> dict[str, object]:
    version = next(version for version in reversed(VERSIONS) if binary(version))
    with Servers(version) as servers:
        scripts = Scripts(servers.url, "bench/client", timeout=5)
        await scripts.call("join", "a", "a:1", "r", 64, os.urandom(8), 600_000, 64)
        home = servers.owner(scripts.prefix).port
        source = script_source("match")
        pool = BlockingConnectionPool.from_url(f"redis://127.0.0.1:{home}", max_connections=64, timeout=5, retry=Retry(NoBackoff(), 0))
        plain = Redis.from_pool(pool)
        cluster = RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", node.port) for node in servers.nodes], max_connections=64)
        await plain.script_load(source)
        asked = (sha1(source.encode()).hexdigest(), 2, scripts.prefix, scripts.prefix + "meta", HASHES)
        ways: dict[str, Call] = {
            "ours, in a cluster": lambda: scripts.redis.execute("EVALSHA", *asked),
            "redis-py, one node": lambda: plain.execute_command("EVALSHA", *asked),  # type: ignore[no-untyped-call]
            "redis-py RedisCluster": lambda: cluster.execute_command("EVALSHA", *asked),
        }
        found: dict[str, dict[int, list[float]]] = {name: {1: [], 64: []} for name in ways}
        for call in ways.values():
            await microseconds(call, 1)  # connections
        for _ in range(rounds):
            for callers in (1, 64):
                for name, call in ways.items():
                    found[name][callers].append(await microseconds(call, callers))
        await scripts.close()
        await plain.aclose()
        await cluster.aclose()
    ours = found["ours, in a cluster"]
    print(f"{version}, {rounds} rounds of {CALLS} calls\n{'':24}{'1 caller us':>14}{'64 callers us':>16}   times ours (1 caller; 64)")
    for name, times in found.items():
        ratios = [sorted(theirs / mine for theirs, mine in zip(times[n], ours[n], strict=True)) for n in (1, 64)]
        spread = "; ".join(f"{each[0]:.1f} to {each[-1]:.1f}" for each in ratios)
        print(f"{name:24}{statistics.median(times[1]):14.0f}{statistics.median(times[64]):16.0f}   {spread}")
    return {name: {f"{n}_callers_us": statistics.median(times[n]) for n in (1, 64)} for name, times in found.items()}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    result = asyncio.run(measure(options.rounds))
    write_report(__name__, options, result)
