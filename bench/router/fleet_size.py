"""Fleets of up to 5,000 workers: time until all are usable, idle CPU, latency beside the health checks.

The workers are stand-ins in two processes (`other_servers/fake_fleet.py`), found by a file and read without an index. A request is short
and answered at once, so its time is the router's. Two cores serve all of it: a busy machine makes the latency worse, the CPU time less so.
"""

import http.client
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.common.report import make_parser, write_report
from bench.other_servers.fake_fleet import fake_fleet
from bench.other_servers.process import Running, free_port
from bench.other_servers.servers import Command

SIZES = (16, 500, 2000, 5000)
GIVE_UP_SECONDS = 60.0
PACKAGES = ("common", "index", "router", "operator", "worker", "cli", ".")
BODY = json.dumps({"model": "bench", "prompt": "A prompt of a few words.", "max_tokens": 1})


def measure(checkout: Path, count: int, seconds: float, folder: Path) -> dict[str, float]:
    """Return the figures of one fleet."""
    port, listed, log = free_port(), folder / "workers", folder / f"router-{count}.log"
    with fake_fleet(count) as addresses:
        listed.write_text("".join(f"{address}\n" for address in addresses))
        command = [sys.executable, "-m", "fairlead_router.main", "--host", "127.0.0.1", "--port", str(port), "--log-level", "INFO"]
        command += ["--workers", f"file://{listed}", "--drain-grace", "0", "--drain-timeout", "1"]
        path = os.pathsep.join(str(checkout / package) for package in PACKAGES)
        with Running(Command(command, variables={"PYTHONPATH": path}), port, log) as router:
            usable = _wait_until_usable(log, count)
            time.sleep(1)
            before, began = router.cpu_seconds(), time.monotonic()
            time.sleep(seconds)
            idle = (router.cpu_seconds() - before) / (time.monotonic() - began)
            times = _request(port, seconds)
            scrape, status = _page(port, "/metrics"), _page(port, "/fairlead/workers")
    return {
        "workers": float(count),
        "usable": usable,
        "idle_percent": 100 * idle,
        "p50_ms": 1000 * statistics.median(times),
        "p99_ms": 1000 * statistics.quantiles(times, n=100)[98],
        "metrics_ms": scrape,
        "workers_page_ms": status,
    }


def _wait_until_usable(log: Path, count: int) -> float:
    """Return the seconds from the router's first check until all workers were found ready; infinite if some never are."""
    began = time.monotonic()
    first = 0.0
    while time.monotonic() - began < GIVE_UP_SECONDS:
        text = log.read_text()
        first = first or (time.monotonic() if "running on" in text else 0.0)
        if text.count("is ready (pod") >= count:
            return time.monotonic() - first
        time.sleep(0.1)
    return float("inf")


def _request(port: int, seconds: float) -> list[float]:
    """Return the seconds of each of some requests, fifty a second at most."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times) < 20:
        began = time.monotonic()
        connection.request("POST", "/v1/completions", BODY, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        times.append(time.monotonic() - began)
        time.sleep(max(0.0, 0.02 - times[-1]))
    return times


def _page(port: int, path: str) -> float:
    """Return the longest of a few requests' milliseconds that runs while a page is rendered: how long it stops the event loop."""

    def fetch() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(3):
            connection.request("GET", path)
            connection.getresponse().read()

    fetching = threading.Thread(target=fetch)
    fetching.start()
    slowest = 0.0
    while fetching.is_alive():
        slowest = max(slowest, _health(port))
    fetching.join()
    return 1000 * slowest


def _health(port: int) -> float:
    """Return the seconds of one request that costs nothing itself."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began = time.monotonic()
    connection.request("GET", "/health")
    connection.getresponse().read()
    return time.monotonic() - began


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of workers (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of idling, and of requests")
    parser.add_argument("--baseline", type=Path, help="another checkout, measured before this one at each size (default: none)")
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    print("| checkout | workers | all usable, s | idle CPU, % | p50, ms | p99, ms | stall by /metrics, ms | by /fairlead/workers, ms |")
    print("| --- |" + " --- |" * 7)
    checkouts = {"this": Path(__file__).parents[2]}
    if options.baseline:
        checkouts = {"baseline": options.baseline.resolve(), **checkouts}
    with TemporaryDirectory() as folder:
        for count in options.sizes:
            for name, checkout in checkouts.items():
                figures = measure(checkout, count, options.seconds, Path(folder))
                results.setdefault(name, []).append(figures)
                count_text, *others = figures.values()
                print(f"| {name} | {count_text:.0f} | " + " | ".join(f"{value:.1f}" for value in others) + " |", flush=True)
    write_report(__name__, options, results)


if __name__ == "__main__":
    main()
