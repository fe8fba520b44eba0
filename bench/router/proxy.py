"""Throughput, added latency and CPU of Fairlead's router and other routers, each on one core.

All routers run all the time and are measured in turns of a few seconds, so that other work on the machine slows all of them alike.
A mock worker and a load client in C use the other cores.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench.common.report import make_parser, write_report
from bench.other_servers.environments import NotMade, make
from bench.other_servers.process import NotServing, Running, free_port
from bench.other_servers.servers import Command
from bench.router.routers import ROUTERS, of_checkout, own
from bench.router.tools import NoCompiler, Scenario, Tools, build, load, mock_worker, on_cores

CACHE = Path.home() / ".cache" / "fairlead" / "peers"
SCENARIOS = (
    Scenario("one", 1),
    Scenario("busy", 32),
    Scenario("stream-64", 32, 64),
    Scenario("stream-256", 32, 256),
    Scenario("paced", 256, 64, 20_000),
)
DIRECT = "direct"
BASELINE = "@baseline"
PAIRED = ("rps", "rps_cpu", "chunks_per_second")
"""Figures that are compared with the baseline's. More is better."""
Figures = dict[str, float]
BARS = (
    ("sglang-router", "busy", "rps", 0.5, True),
    ("sglang-router", "busy", "rps_cpu", 0.5, True),
    ("sglang-router", "one", "added_p50", 2.0, False),
    ("sglang-router", "one", "added_p99", 2.0, False),
    ("sglang-router", "stream-64", "chunks_per_second", 0.5, True),
    ("sglang-router", "paced", "cpu_chunk", 2.0, False),
)
"""(peer, scenario, figure, bound, whether the ratio must be at least the bound, else at most)."""


def main() -> int:
    """Return 1 where a tool of the benchmark cannot be built or ends with an error."""
    try:
        return compare_routers()
    except subprocess.CalledProcessError as error:
        print(f"bench: router/proxy: {error}", file=sys.stderr)
        return 1


def compare_routers() -> int:
    """Measure every router under every load, print the table and the ratios, write the report."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--routers", default=",".join(ROUTERS), help="comma-separated (default: all)")
    parser.add_argument("--baseline", type=Path, help="another checkout of Fairlead with its .venv: its router takes turns with this one's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where environments and tools are kept")
    options = parser.parse_args()
    names = options.routers.split(",")
    if unknown := [name for name in names if name not in ROUTERS]:
        parser.error(f"{', '.join(unknown)}: not known; choose from {', '.join(ROUTERS)}")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("needs two cores: one for the router, one for the worker and the client")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that nothing is left running
    try:
        tools = build(options.cache)
    except NoCompiler as error:
        print(f"bench: router/proxy: {error}", file=sys.stderr)
        return 1
    runs: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairlead-router-")))
        worker = free_port()
        stack.enter_context(mock_worker(tools, worker, cores[1:], scratch))
        running = start(names, worker, cores[0], options.cache, scratch, stack, missing)
        if options.baseline:
            for name in [name for name in names if ROUTERS[name].environment is None]:
                port = free_port()
                command = ROUTERS[name].command(of_checkout(options.baseline), port, worker)
                other = Running(Command(on_cores([cores[0]], *command)), port, scratch / f"{name}{BASELINE}.log")
                running[name + BASELINE] = stack.enter_context(other)
                other.wait_ready()
        for repeat in range(options.repeats):
            print(f"== repeat {repeat + 1} of {options.repeats}", flush=True)
            for scenario in SCENARIOS:
                base = measure(tools, None, worker, scenario, cores, scratch, options.seconds)
                runs[DIRECT, scenario.name].append(base)
                for name, router in list(running.items())[:: 1 - 2 * (repeat % 2)]:
                    figures = measure(tools, router, router.port, scenario, cores, scratch, options.seconds)
                    for quantile in ("p50", "p99"):
                        figures[f"added_{quantile}"] = figures[f"whole_{quantile}"] - base[f"whole_{quantile}"]
                    runs[name, scenario.name].append(figures)
    table = {key: {figure: median(run[figure] for run in found) for figure in found[0]} for key, found in runs.items()}
    report(table, missing)
    pairs = beside_baseline(runs)
    for pair in pairs:
        print("{router:16} {load:10} {figure:18} {median:6.3f}  of the baseline's ({lowest:.3f} to {highest:.3f})".format(**pair))
    rows = [{"router": name, "load": load_name, **figures} for (name, load_name), figures in table.items()]
    write_report(__name__, options, {"rows": rows, "ratios": ratios(table), "pairs": pairs, "missing": missing})
    return 0


def start(
    names: list[str], worker: int, core: int, cache: Path, scratch: Path, stack: ExitStack, missing: dict[str, str]
) -> dict[str, Running]:
    """Return the routers that could be installed and that answer."""
    running = {}
    for name in names:
        router, port = ROUTERS[name], free_port()
        try:
            environment = make(router.environment, cache) if router.environment else own()
            command = Command(on_cores([core], *router.command(environment, port, worker)))
            started = stack.enter_context(Running(command, port, scratch / f"{name}.log"))
            started.wait_ready()
            running[name] = started
        except (NotMade, NotServing) as error:
            missing[name] = str(error)
            print(f"   {name} is left out: {error}", flush=True)
    return running


def measure(
    tools: Tools, router: Running | None, port: int, scenario: Scenario, cores: list[int], scratch: Path, seconds: float
) -> Figures:
    """Put one load on one router (None: on the worker directly). Latencies and `cpu_*` are in microseconds."""
    before = router.cpu_seconds() if router else 0.0
    seen = load(tools, port, scenario, cores[1:], scratch, seconds, warm=0.0)
    cpu = 1e6 * ((router.cpu_seconds() if router else 0.0) - before)
    figures = {"rps": seen["rps"], "chunks_per_second": seen["chunks_per_second"], "errors": float(seen["errors"])}
    for kind in ("whole", "first", "way"):
        figures |= {f"{kind}_{quantile}": seen[kind].get(quantile, 0.0) for quantile in ("p50", "p99")}
    figures["cpu_request"] = cpu / max(1, seen["requests"])
    figures["rps_cpu"] = 1e6 / figures["cpu_request"] if cpu else 0.0
    figures["cpu_chunk"] = cpu / seen["chunks"] if seen["chunks"] else 0.0
    return figures


def ratios(table: dict[tuple[str, str], Figures]) -> list[dict[str, object]]:
    """Return Fairlead's figure divided by that of each measured peer, with its target."""
    found: list[dict[str, object]] = []
    for peer, scenario, figure, bound, at_least in BARS:
        if (peer, scenario) in table and ("fairlead", scenario) in table:
            ratio = table["fairlead", scenario][figure] / max(table[peer, scenario][figure], 1e-9)
            kept = ratio >= bound if at_least else ratio <= bound
            named: dict[str, object] = {"peer": peer, "load": scenario, "figure": figure}
            found.append(named | {"ratio": ratio, "bound": bound, "at_least": at_least, "kept": kept})
    return found


def beside_baseline(runs: dict[tuple[str, str], list[Figures]]) -> list[dict[str, Any]]:
    """Return the median and the range of each figure divided by the baseline's of the same repeat."""
    found: list[dict[str, Any]] = []
    for (name, kind), others in runs.items():
        if not name.endswith(BASELINE):
            continue
        router = name.removesuffix(BASELINE)
        for figure in PAIRED:
            pairs = [ours[figure] / theirs[figure] for ours, theirs in zip(runs[router, kind], others, strict=True) if theirs[figure]]
            if pairs:
                named: dict[str, Any] = {"router": router, "load": kind, "figure": figure}
                found.append(named | {"median": median(pairs), "lowest": min(pairs), "highest": max(pairs)})
    return found


COLUMNS = {
    "rps": "req/s",
    "rps_cpu": "req/CPU s",
    "chunks_per_second": "chunks/s",
    "whole_p50": "whole p50",
    "added_p50": "added p50",
    "added_p99": "added p99",
    "way_p50": "way p50",
    "way_p99": "way p99",
    "cpu_request": "CPU/req",
    "cpu_chunk": "CPU/chunk",
}


def report(table: dict[tuple[str, str], Figures], missing: dict[str, str]) -> None:
    print(f"{'load':11} {'router':16}" + "".join(f"{title:>11}" for title in COLUMNS.values()) + "  errors (times in us)")
    for scenario in SCENARIOS:
        for name, kind in table:
            if kind == scenario.name:
                row = table[name, kind]
                print(f"{kind:11} {name:16}" + "".join(f"{row.get(column, 0.0):11,.1f}" for column in COLUMNS) + f"  {row['errors']:.0f}")
    for ratio in ratios(table):
        sign, verdict = ">=" if ratio["at_least"] else "<=", "pass" if ratio["kept"] else "short"
        what = f"{ratio['peer']:14} {ratio['load']:10} {ratio['figure']:18}"
        print(f"fairlead / {what}{ratio['ratio']:7.2f}  {sign} {ratio['bound']}  {verdict}")
    for name, why in missing.items():
        print(f"{name} is missing: {why}")
