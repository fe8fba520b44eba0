"""Index memory, lookup latency, latency under load and recovery, beside llm-d's schema and Dynamo's RadixTree.

The two sides of each comparison alternate on one machine.
"""

import os
import statistics
from collections.abc import Callable
from pathlib import Path

import redis

from bench.common.report import make_parser, write_report
from bench.index import choice_by_fleet_size as scaling
from bench.index import lookup_under_load as load
from bench.index import schema, trace
from bench.index import startup_and_recovery as pace
from bench.index.redis_server import Numbers, server

QUICK_PLACEMENTS = 300_000


def median(runs: list[Numbers]) -> Numbers:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--placements", type=int, default=10_000_000, help="(pod, block) pairs of the memory figure")
    parser.add_argument(
        "--peer-placements", type=int, default=1_000_000, help="pairs in llm-d's schema, which takes half a kilobyte for each"
    )
    parser.add_argument("--mirror-placements", type=int, default=1_000_000, help="pairs that a starting mirror reads")
    parser.add_argument("--pods", type=int, default=64, help="pods that hold some of the prompt")
    parser.add_argument("--blocks", type=int, default=2048, help="blocks of the prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run under load")
    parser.add_argument("--rate", type=float, default=100_000.0, help="blocks written a second under load")
    parser.add_argument("--trace", type=Path, default=Path(os.environ["TRACE"]) if os.environ.get("TRACE") else None)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fairlead" / "index")
    parser.add_argument("--quick", action="store_true", help="does it run: few placements, one repeat")
    options = parser.parse_args()
    if options.quick:
        options.placements = options.peer_placements = options.mirror_placements = QUICK_PLACEMENTS
        options.repeats, options.seconds = 1, 3.0

    found: dict[str, object] = {}
    ratios: list[tuple[str, float, float, Callable[[float, float], bool]]] = []

    def at_most(name: str, measured: float, bound: float) -> None:
        ratios.append((name, measured, bound, float.__le__))

    def at_least(name: str, measured: float, bound: float) -> None:
        ratios.append((name, measured, bound, float.__ge__))

    print(f"== beside llm-d's Redis schema: {options.placements:,} and {options.peer_placements:,} placements", flush=True)
    with server() as path:
        about = redis.Redis(unix_socket_path=path).info("server")
        version = f"{about.get('server_name', 'redis')} {about.get('valkey_version', about['redis_version'])}"
        print(version, flush=True)
        held, chain = schema.memory(path, options.placements, options.peer_placements, options.pods, options.blocks)
        asked = schema.lookups(path, chain, options.pods, options.repeats)
    ours, peer = held["fairlead"] | asked["fairlead"], held["llm-d schema"] | asked["llm-d schema"]
    found["schema"] = {"redis": version, "fairlead": ours, "llm-d schema": peer}
    print(f"{'':14}{'placements':>12}{'B each':>8}{'stored/s':>10}{'p50 us':>9}{'p99 us':>9}{'server CPU us':>15}")
    for name, row in (("fairlead", ours), ("llm-d schema", peer)):
        columns = [row[key] for key in ("placements", "bytes_per_placement", "stored_per_s", "p50_us", "p99_us", "server_cpu_us")]
        print("{:14}{:12,.0f}{:8.1f}{:10,.0f}{:9.0f}{:9.0f}{:15.0f}".format(name, *columns))
    at_most("index_bytes_per_placement", ours["bytes_per_placement"], 20.0)
    at_least("index_memory_ratio", peer["bytes_per_placement"] / ours["bytes_per_placement"], 15.0)
    at_least("index_lookup_ratio", peer["p50_us"] / ours["p50_us"], 30.0)

    print(f"== remote: {load.ROUTERS} routers at once while {options.rate:,.0f} blocks/s are written", flush=True)
    under = {"calm": [], "written": []}  # type: dict[str, list[Numbers]]
    for _ in range(options.repeats):
        for name, rate in (("calm", options.rate / 1000), ("written", options.rate)):
            with server(load.SERVER) as path, server(load.SERVER) as idle:
                under[name].append(load.measure(path, idle, rate, options.seconds))
    found["load"] = under
    print(
        f"{'':14}{'asks/s':>8}{'p50 us':>9}{'p90 us':>9}{'p99 us':>9}{'PING p99':>10}{'machine p99':>13}"
        f"{'written/s':>11}{'batches/s':>11}{'server cores':>14}{'machine':>9}"
    )
    for name, runs in under.items():
        row = median(runs)
        timed = "".join(f"{row[key]:9.0f}" for key in ("p50_us", "p90_us", "p99_us"))
        print(
            f"{name:14}{row['asks_per_s']:8.0f}{timed}{row['ping_p99_us']:10.0f}{row['machine_p99_us']:13.0f}{row['acknowledged_per_s']:11,.0f}"
            f"{row['batches_per_s']:11,.0f}{row['server_cores']:14.2f}{row['machine_cores']:7.1f}/{row['cores']:.0f}"
        )
    best = min(under["written"], key=lambda run: run["p99_us"])
    at_most("remote_p99_us", median(under["written"])["p99_us"], 1000.0)
    at_most("remote_p99_us_best_run", best["p99_us"], 1000.0)

    print(f"== starts and returns: a mirror of {options.mirror_placements:,} placements, pods of {pace.POD_BLOCKS:,} blocks", flush=True)
    with server() as path:
        _, chain = schema.memory(path, options.mirror_placements, 1000, options.pods, options.blocks)
        expected = {f"10.1.0.{pod}:8000": n * schema.BLOCK_TOKENS for pod, n in enumerate(schema.depths(options.blocks, options.pods)) if n}
        mirrors = [pace.mirror(path, chain, expected) for _ in range(options.repeats)]
    converged = []
    for _ in range(options.repeats):
        with server() as path:
            converged.append(pace.convergence(path))
    engine = pace.engine_call(options.repeats)
    found |= {"mirror": mirrors, "convergence": converged, "engine": engine}
    for name, row in (("mirror", median(mirrors)), ("convergence", median(converged)), ("engine's call", engine)):
        print(f"{name:14}" + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    at_most("mirror_start_seconds", median(mirrors)["start_s"], 1.0)
    at_most("convergence_seconds", median(converged)["recall_one_s"], 2.0)
    at_most("engine_ns_per_block", max(engine.values()), 1000.0)

    print("== mirror beside ai-dynamo-runtime's RadixTree, conversation trace", flush=True)
    try:
        sides = trace.compare(options.trace, options.cache, options.repeats)
    except trace.Missing as missing:
        print(f"left out, missing is {missing}")
    else:
        found["trace"] = sides
        for name, runs in sides.items():
            row = median(runs)
            print(f"{name:14}" + "  ".join(f"{key} {value:,.1f}" for key, value in row.items()))
        tree, table = median(sides["RadixTree"]), median(sides["mirror"])
        at_least("mirror_lookup_ratio_p50", tree["p50_us"] / table["p50_us"], 10.0)
        at_least("mirror_lookup_ratio_p99", tree["p99_us"] / table["p99_us"], 10.0)

    print(f"== a choice in a large fleet: {max(scaling.WORKERS)} workers beside {min(scaling.WORKERS)}", flush=True)
    found["scaling"] = ratio_of = scaling.run(rounds=3 if options.quick else 40)
    for name, ratio in ratio_of.items():
        at_most(f"scaling_{name.replace(' ', '_')}", ratio, scaling.BOUND)

    for name, measured, bound, holds in ratios:
        print(
            f"{name:26}{measured:10.2f}  {'<=' if holds is float.__le__ else '>='} {bound:<8g}{'ok' if holds(measured, bound) else 'short'}"
        )
    write_report(__name__, options, found)
