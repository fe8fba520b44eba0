"""Time of one routing choice with reservation and release, by the index mirror and by a Redis round trip.

A real redis-server listens on a unix socket. The workers hold the first half of the prompt. Microseconds of wall time, one choice at a
time; the two modes alternate.
"""

import asyncio
import time
from statistics import median, quantiles

from tests.router.harness import eventually
from tests.servers.redis_server import RedisServer

from bench.common.report import make_parser, write_report
from fairlead_index.hashing import block_hashes
from fairlead_index.redis.access import RedisAccess
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter
from fairlead_router.config import IndexMode
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.prefix_aware import IndexConfig, PrefixAware

BLOCK_TOKENS, TURNS, EACH = 64, 20, 50
HASHES = block_hashes(7, range(256 * BLOCK_TOKENS), BLOCK_TOKENS)


async def measure(url: str, count: int) -> dict[str, list[float]]:
    """Return the microseconds of each choice, by mode."""
    namespace = f"bench/routing{count}"
    addresses = [f"10.0.{number // 250}.{number % 250 + 1}:8000" for number in range(count)]
    writers = [IndexWriter(url, namespace, WorkerCard(address, address, BLOCK_TOKENS), buckets=256) for address in addresses]
    for writer in writers:
        writer.start()
        writer.store(HASHES[:128])
        writer.report(WorkerLoad(prefill_rate=8000.0, pages_free=10_000, pages_total=10_000, page_size=16))
    await eventually(lambda: all(writer.incarnation for writer in writers), "the workers are in the index", 60)
    policies: dict[str, PrefixAware] = {}
    modes: tuple[IndexMode, ...] = ("remote", "mirror")
    for mode in modes:
        table = WorkerTable()
        table.set_addresses(addresses)
        for worker, writer in zip(table, writers, strict=True):
            worker.ready, worker.incarnation = True, writer.incarnation
        policies[mode] = PrefixAware(table, IndexConfig(RedisAccess(url), namespace, mode), Metrics(table))
        policies[mode].start()
    mirrored = policies["mirror"]._mirror
    assert mirrored is not None
    wanted = RoutingRequest(len(HASHES) * BLOCK_TOKENS, HASHES)
    await eventually(lambda: mirrored.is_preferred and len(mirrored.fleet.workers) == count, "the workers are in the copy", 60)
    await eventually(lambda: all(mirrored.held(wanted, address) for address in addresses), "their blocks too", 60)
    found: dict[str, list[float]] = {mode: [] for mode in policies}
    for _ in range(TURNS):
        for name, policy in policies.items():
            for _ in range(EACH):
                began = time.perf_counter()
                choice = await policy.choose(wanted, ())
                found[name].append(1e6 * (time.perf_counter() - began))
                assert choice is not None
                policy.release(choice)
                await asyncio.sleep(0)
    await asyncio.gather(*(policy.close() for policy in policies.values()), *(writer.leave(0.1) for writer in writers))
    return found


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    arguments = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with RedisServer("6.2", unix_socket=True) as redis:
        for count in arguments.workers:
            for mode, times in asyncio.run(measure(redis.url, count)).items():
                figures[f"{count} {mode}"] = {"p50": median(times), "p99": quantiles(times, n=100)[98]}
    print(f"{'workers, read':<16} {'p50 us':>8} {'p99 us':>8}")
    for name, row in figures.items():
        print(f"{name:<16} {row['p50']:>8.0f} {row['p99']:>8.0f}")
    write_report(__name__, arguments, figures)
