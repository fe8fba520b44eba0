"""Time of one routing choice with 16, 64 and 500 workers, by how many workers hold the prompt.

`match` is the server's own time of the script, from INFO commandstats. `mirror` and `alone` are the wall
time of the router's choice with its copy of the index and without an index. The prompt is held by no worker (cold), by few, or by all.
Each figure is the least of the rounds, in microseconds, because other work on a machine only adds time.
"""

import asyncio
import os
import random
import time
from array import array

from tests.router.harness import eventually
from tests.servers.redis_server import RedisServer

from bench.common.report import make_parser, write_report
from fairlead_index.changes import Changes, pack
from fairlead_index.hashing import hash_bytes
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.scripts import Scripts
from fairlead_index.score import CONSIDERED, SMALL_FLEET
from fairlead_index.worker_load import WorkerLoad
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.prefix_aware import PrefixAware
from fairlead_router.routing.prefix_lookup import IndexConfig

WORKERS = (16, 64, 500)
CASES = ("cold", "few", "all")
BLOCKS, BLOCK_TOKENS, FEW = 64, 64, 3
BOUND = 1.5
"""Upper limit of the cost with the most workers divided by that with the fewest."""


def prompts(draw: random.Random) -> dict[str, "array[int]"]:
    """Return the blocks of each case's prompt. All workers hold at most its first half, as they would hold a system prompt."""
    return {case: array("Q", [draw.getrandbits(64) for _ in range(BLOCKS)]) for case in CASES}


async def fill(scripts: Scripts, count: int, asked: dict[str, "array[int]"]) -> tuple[list[str], dict[str, str]]:
    """Return the addresses of the workers and their incarnations."""
    draw, addresses, incarnations = random.Random(3), list[str](), dict[str, str]()
    for number in range(count):
        address, epoch = f"10.0.{number // 250}.{number % 250 + 1}:8000", os.urandom(8)
        _, slot = await scripts.call("join", f"p{number}", address, "r", BLOCK_TOKENS, epoch, 3_600_000, 256)
        changes = Changes()
        changes.restart()
        changes.store(asked["all"][: BLOCKS // 2])
        if number < FEW:
            changes.store(asked["few"])
        await scripts.call("apply", slot, epoch, 1, *pack(changes.take(10**6)))
        backlog = draw.randrange(4000)
        await scripts.call("heartbeat", slot, epoch, 1, 0, 1, 0, backlog, 8000.0, 0.01, 10_000, 10_000, 16, 0)
        addresses.append(address)
        incarnations[address] = epoch.hex()
    return addresses, incarnations


def spent(server: RedisServer) -> float:
    """Return the microseconds that the server spent in scripts."""
    stats = server.client().info("commandstats")
    return float(sum(row["usec"] for name, row in stats.items() if name in ("cmdstat_evalsha", "cmdstat_fcall")))


async def measure(server: RedisServer, count: int, rounds: int, each: int) -> dict[str, dict[str, float]]:
    """Return the figures by method and case."""
    namespace, asked = f"bench/scaling{count}", prompts(random.Random(2))
    scripts = Scripts(server.url, namespace, timeout=10.0)
    addresses, incarnations = await fill(scripts, count, asked)
    at = IndexConfig(RedisAccess(server.url), namespace, "mirror")
    policies: dict[str, PrefixAware] = {}
    for way in ("mirror", "alone"):
        table = WorkerTable()
        table.set_addresses(addresses)
        for worker in table:
            worker.load = WorkerLoad(backlog_tokens=random.Random(worker.address).randrange(4000), prefill_rate=8000.0)
            worker.ready, worker.incarnation = True, incarnations[worker.address]
        policies[way] = PrefixAware(table, at if way == "mirror" else None, Metrics(table))
    policies["mirror"].start()
    mirrored, fleet = policies["mirror"].lookup, policies["mirror"]._fleet
    assert mirrored is not None and fleet is not None

    def in_the_copy() -> bool:
        named = len(fleet.workers) == count
        return mirrored.prefers_copy and named and bool(mirrored.held(RoutingRequest(1, asked["all"]), addresses[-1]))

    await eventually(in_the_copy, "the workers are in the copy", 60)
    limits = () if count <= SMALL_FLEET else (CONSIDERED, fleet.slots_of(list(fleet.soonest)[:CONSIDERED]), b"")
    found: dict[str, dict[str, list[float]]] = {way: {case: [] for case in CASES} for way in ("match", "mirror", "alone")}
    draw = random.Random(4)
    for _ in range(rounds):
        for case in CASES:
            hashes = asked[case] if case != "cold" else array("Q", [draw.getrandbits(64) for _ in range(BLOCKS)])
            packed, before = hash_bytes(hashes), spent(server)
            for _ in range(each):
                await scripts.call("match", packed, *limits)
            found["match"][case].append((spent(server) - before) / each)
            wanted = RoutingRequest(BLOCKS * BLOCK_TOKENS, hashes)
            for way, policy in policies.items():
                choices, began = [], time.perf_counter()
                for _ in range(each):
                    choices.append(await policy.choose(wanted, ()))
                found[way][case].append(1e6 * (time.perf_counter() - began) / each)
                for choice in choices:
                    assert choice is not None
                    policy.release(choice)
            await asyncio.sleep(0)
    await asyncio.gather(*(policy.close() for policy in policies.values()), scripts.close())
    return {way: {case: min(times) for case, times in cases.items()} for way, cases in found.items()}


def run(rounds: int = 40, each: int = 25) -> dict[str, float]:
    """Print the table; return the ratio of the most workers to the fewest for each row."""
    version = os.environ.get("REDIS_VERSION", "6.2")
    with RedisServer(version, unix_socket=True) as server:
        by_count = {count: asyncio.run(measure(server, count, rounds, each)) for count in WORKERS}
    ratios: dict[str, float] = {}
    print(f"{'us a choice':<14}" + "".join(f"{count:>8}" for count in WORKERS) + f"{'ratio':>8}")
    for way in ("match", "mirror", "alone"):
        for case in CASES:
            row = [by_count[count][way][case] for count in WORKERS]
            ratios[f"{way} {case}"] = row[-1] / row[0]
            print(f"{way + ' ' + case:<14}" + "".join(f"{each:>8.1f}" for each in row) + f"{row[-1] / row[0]:>8.2f}", flush=True)
    return ratios


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=40, help="the least of these is the figure (default: %(default)s)")
    options = parser.parse_args()
    write_report(__name__, options, {"ratios": run(options.rounds)})
