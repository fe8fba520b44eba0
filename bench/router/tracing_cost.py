"""CPU time of the router per request with tracing off, not sampled, and on, beside another checkout.

All routers run at once, each with its own mock worker's answers, and are loaded in turn, so that a busy machine slows all alike. Each round
gives one ratio to the first router; the figures are medians. CPU time of the router's process, with the thread that exports.
"""

import argparse
import os
import statistics
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.servers.otlp_receiver import otlp_receiver

from bench.common.report import make_parser, write_report
from bench.other_servers.process import Running, free_port
from bench.other_servers.servers import Command
from bench.router.proxy import CACHE
from bench.router.tools import Scenario, Tools, build, load, mock_worker

SCENARIOS = (Scenario("whole", 4), Scenario("stream", 4, chunks=64))
HERE = Path(__file__).parents[2]
PACKAGES = ("common", "index", "router", "operator", "worker", "cli", ".")
READY_SECONDS = 60.0


def python_path(checkout: Path) -> str:
    """Return the PYTHONPATH with which a process runs another checkout's code."""
    return os.pathsep.join(str(checkout / package) for package in PACKAGES)


def start(stack: ExitStack, checkout: Path, worker: int, name: str, folder: Path, **variables: str) -> Running:
    port = free_port()
    command = [sys.executable, "-m", "fairlead_router.main", "--host", "127.0.0.1", "--port", str(port), "--log-level", "INFO"]
    command += ["--workers", f"static://127.0.0.1:{worker}", "--drain-grace", "0", "--drain-timeout", "1"]
    variables = {"PYTHONPATH": python_path(checkout), **variables}
    running = stack.enter_context(Running(Command(command, variables=variables), port, folder / f"{name}.log"))
    deadline = time.monotonic() + READY_SECONDS
    while not _is_ready(port):
        assert time.monotonic() < deadline, f"{name} is not ready: {(folder / f'{name}.log').read_text()}"
        time.sleep(0.05)
    return running


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def measure(
    tools: Tools, routers: dict[str, Running], scenario: Scenario, options: argparse.Namespace, folder: Path
) -> dict[str, list[float]]:
    """Return the microseconds of CPU per request of each round, by router."""
    found: dict[str, list[float]] = {name: [] for name in routers}
    cores = sorted(os.sched_getaffinity(0))
    for number in range(options.rounds + 1):
        for name, router in routers.items() if number % 2 else reversed(routers.items()):
            before = router.cpu_seconds()
            figures = load(tools, router.port, scenario, cores, folder, options.seconds, 0)
            used = 1e6 * (router.cpu_seconds() - before) / figures["requests"]
            if number:  # the first round is a warm-up
                found[name].append(used)
    return found


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--baseline", type=Path, help="another checkout, compared with this one (default: none)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[], help="routers to compare, of baseline, off, not sampled, on (default: all)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of load in a round, for each router")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        tools, worker = build(CACHE), free_port()
        stack.enter_context(mock_worker(tools, worker, sorted(os.sched_getaffinity(0)), folder))
        traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": stack.enter_context(otlp_receiver()).endpoint}
        kinds: dict[str, tuple[Path, dict[str, str]]] = {
            "off": (HERE, {}),
            "not sampled": (HERE, traced | {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}),
            "on": (HERE, traced),
        }
        if options.baseline:
            kinds = {"baseline": (options.baseline.resolve(), {}), **kinds}
        kinds = {kind: how for kind, how in kinds.items() if not options.only or kind in options.only}
        routers = {kind: start(stack, checkout, worker, kind, folder, **variables) for kind, (checkout, variables) in kinds.items()}
        first = next(iter(routers))
        for scenario in SCENARIOS:
            found = measure(tools, routers, scenario, options, folder)
            results[scenario.name] = {}
            for kind, used in found.items():
                ratios = [one / of_first for one, of_first in zip(used, found[first], strict=True)]
                figures = {"microseconds": round(statistics.median(used), 1), "ratio": round(statistics.median(ratios), 3)}
                results[scenario.name][kind] = figures
                print(f"{scenario.name:8} {kind:12} {figures['microseconds']:9.1f} us a request   {figures['ratio']:.3f} of {first}")
    write_report(__name__, options, results)


if __name__ == "__main__":
    main()
