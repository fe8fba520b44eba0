"""One good tenant beside four connections of a hostile one, for each kind of input, with real processes.

Each row has a router of its own (and a batch server, where the input is for it) in front of one tiny worker and a Redis. `ratio` is the
good tenant's p99 beside the hostile connections over its p99 without them, over all rows. `stall` is the longest answer of /health, asked
every 10 ms. `CPU` is what the process and its children used beyond their use for the good tenant. `RSS` is their highest memory above that
before the attack. `charged` are the tokens that left the hostile tenant's bucket, which is never empty here. With other work on the
machine only ratios count. `--search SECONDS` looks for the input that costs the router the most CPU per KiB instead.
"""

import argparse
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median

import httpx
from tests.servers.redis_server import RedisServer, free_port
from tests.system.processes import Process, engine_worker, until

from bench.common.report import make_parser, write_report
from bench.hostile.connections import GOOD_KEY, attacking, watching
from bench.hostile.inputs import KEY, KINDS, MODEL, Kind, Target
from bench.hostile.search import search
from fairlead.bench.report import percentile
from fairlead.random_model import make_model

ALONE_SECONDS, WARM_SECONDS = 1.0, 0.3
SETTLE_SECONDS = 5.0
"""For a small request after the attack; a router that is still busy then has charged something that is not known."""
BURST_TOKENS = 10**12
NAMESPACE = "bench/hostile"
TICK = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
MOST_RATIO, MOST_P99_MS, MOST_STALL_MS, MOST_RSS_MIB = 3.0, 100.0, 30.0, 256.0


@dataclass
class Row:
    """The figures of one kind. Times in milliseconds, CPU in seconds, `rss` in MiB, `charged` in tokens, `sent` in requests."""

    kind: str
    target: Target
    p50: float
    p99: float
    ratio: float
    long: float
    """Slowest good request with a body of 280 KB."""
    stall: float
    stall_alone: float
    cpu: float
    worker_cpu: float
    rss: float
    charged: float
    sent: int
    sent_mib: float
    failed: dict[str, int]
    """Answers of the good tenant other than 200, and of its probes."""
    statuses: dict[str, int]
    """Of the hostile tenant's answers."""

    @property
    def meets_targets(self) -> bool:
        is_quick = self.ratio <= MOST_RATIO and self.p99 <= MOST_P99_MS and self.stall <= MOST_STALL_MS
        return is_quick and self.rss <= MOST_RSS_MIB and not self.failed


class Front:
    """A router, and the batch server behind it, with their own processes."""

    def __init__(self, folder: Path, worker: str, redis: str, tenant: str, has_batches: bool) -> None:
        """`tenant`: name of the hostile tenant. Routers share the bucket of a name through Redis."""
        self.port, self.batch_port = free_port(), free_port() if has_batches else None
        (folder / "keys.yaml").write_text(json.dumps(_keys(tenant)))
        (folder / "secret").write_text("a secret of router and batch server")
        listen = ["--host", "127.0.0.1", "--port"]
        flags = ["--workers", f"static://{worker}", "--redis-url", redis, "--index-namespace", NAMESPACE, "--poll-interval", "0.2"]
        flags += ["--api-keys-file", str(folder / "keys.yaml"), "--drain-grace", "0"]
        if self.batch_port is not None:
            flags += ["--batch-url", f"http://127.0.0.1:{self.batch_port}", "--batch-secret-file", str(folder / "secret")]
        self.processes: dict[Target, Process] = {
            "router": Process(
                "router", [sys.executable, "-m", "fairlead_router.main", *listen, str(self.port), *flags], folder / "router.log"
            )
        }
        if self.batch_port is not None:
            command = [
                sys.executable,
                "-m",
                "fairlead_router.batch.main",
                *listen,
                str(self.batch_port),
                "--storage",
                f"file://{folder / 'files'}",
            ]
            command += ["--router-url", f"http://127.0.0.1:{self.port}", "--secret-file", str(folder / "secret")]
            self.processes["batch"] = Process("batch", command, folder / "batch.log")

    def __enter__(self) -> "Front":
        for process in self.processes.values():
            process.start()
        until(lambda: self._answers(), "router and batch server answer")
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes.values():
            process.kill()

    def _answers(self) -> bool:
        urls = [f"http://127.0.0.1:{self.port}/ready"] + ([f"http://127.0.0.1:{self.batch_port}/ready"] if self.batch_port else [])
        for process in self.processes.values():
            assert not process.has_ended, process.log
        try:
            return all(httpx.get(url, trust_env=False).status_code == 200 for url in urls)
        except httpx.HTTPError:
            return False

    def tokens_left(self) -> float:
        """Return the level of the hostile tenant's bucket."""
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.post(
            f"http://127.0.0.1:{self.port}/v1/completions", json=body, headers=headers, timeout=SETTLE_SECONDS, trust_env=False
        )
        answer.raise_for_status()
        return float(answer.headers["x-ratelimit-remaining-tokens"])


def _keys(tenant: str) -> dict[str, object]:
    hashed = {name: [{"sha256": sha256(key.encode()).hexdigest()}] for name, key in (("good", GOOD_KEY), ("hostile", KEY))}
    # A bucket that is never empty and fills slowly: its level tells each charge.
    hostile = {"keys": hashed["hostile"], "tokensPerMinute": 1, "burstTokens": BURST_TOKENS}
    return {"saltSecret": "a secret for salts of at least 32 characters", "tenants": {"good": {"keys": hashed["good"]}, tenant: hostile}}


def family(pid: int) -> list[int]:
    """Return a process and its descendants that run now."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(child))]


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, ended ones included."""
    total = 0
    for one in family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / TICK


def resident_mib(pid: int, name: str = "VmRSS") -> float:
    """Return the memory of a process and its descendants. `name`: VmHWM for the highest of each since `forget_peak`."""
    total = 0
    for one in family(pid):
        try:
            found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{one}/status").read_text(), re.M)
        except OSError:
            continue
        total += int(found[1]) if found else 0
    return total / 1024


def forget_peak(pid: int) -> None:
    for one in family(pid):
        Path(f"/proc/{one}/clear_refs").write_text("5")


def _within(pairs: Sequence[tuple[float, float]], start: float, end: float) -> list[float]:
    """Return the milliseconds of the requests that began in a window."""
    return [1e3 * seconds for began, seconds in pairs if start <= began < end]


def _differences(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(after, before, strict=True)]


def measure(kind: Kind, address: str, worker: Process, redis: str, options: argparse.Namespace) -> tuple[Row, list[float]]:
    """Return the row of one kind without its ratio, and the good tenant's times before the attack, ms."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairlead-hostile-")))
        front = stack.enter_context(Front(folder, address, redis, kind.name.replace(" ", "-"), has_batches=kind.target == "batch"))
        attack = stack.enter_context(attacking(kind, front.port, kind.connections or options.connections, options.seed))
        end = stack.enter_context(watching(front.port, front.batch_port))
        pid = front.processes[kind.target].pid
        cost = front.tokens_left() - front.tokens_left()
        time.sleep(WARM_SECONDS)
        left = front.tokens_left()
        began, clock = time.monotonic(), [cpu_seconds(each) for each in (pid, worker.pid)]
        time.sleep(ALONE_SECONDS)
        attacked, before = time.monotonic(), [cpu_seconds(each) for each in (pid, worker.pid)]
        idle = resident_mib(pid)
        forget_peak(pid)
        sent = attack(options.seconds)
        stopped, after = time.monotonic(), [cpu_seconds(each) for each in (pid, worker.pid)]
        rss = resident_mib(pid, "VmHWM") - idle
        seen = end()
        try:
            charged = left - front.tokens_left() - cost
        except httpx.HTTPError:
            charged = float("nan")
    used, alone_used = _differences(after, before), _differences(before, clock)
    answers, probes = seen.answers[kind.target], seen.probes[kind.target]
    alone, beside = _within(answers, began, attacked), _within(answers, attacked, stopped)
    row = Row(
        kind.name,
        kind.target,
        p50=median(beside),
        p99=percentile(beside, 99),
        ratio=0.0,
        long=max(_within(seen.answers["long"], attacked, stopped), default=float("nan")),
        stall=max(_within(probes, attacked - 0.5, stopped), default=float("nan")),
        stall_alone=max(_within(probes, began, attacked - 0.5), default=float("nan")),
        cpu=max(0.0, used[0] - alone_used[0] / max(1, len(alone)) * len(beside)),
        worker_cpu=max(0.0, used[1] - alone_used[1] / max(1, len(alone)) * len(beside)),
        rss=rss,
        charged=charged,
        sent=sent.requests,
        sent_mib=sent.bytes / MIB,
        failed=dict(seen.failed),
        statuses=dict(sent.statuses.most_common(4)),
    )
    return row, alone


COLUMNS = ("good p50 ms", "p99 ms", "ratio", "long ms", "stall ms", "CPU s", "worker s", "RSS MiB", "charged", "sent", "MiB", "answers")


def line_of(row: Row) -> str:
    answers = " ".join(f"{count} x {status}" for status, count in row.statuses.items())
    if row.failed:
        answers += f"; good: {' '.join(f'{count} x {status}' for status, count in row.failed.items())}"
    figures = (
        row.p50,
        row.p99,
        row.ratio,
        row.long,
        row.stall,
        row.cpu,
        row.worker_cpu,
        row.rss,
        row.charged,
        float(row.sent),
        row.sent_mib,
    )
    cells = [f"{figure:>11,.1f}" if figure < 1000 else f"{figure:>11,.0f}" for figure in figures]
    return f"{row.kind:18}" + "".join(cells) + f"  {answers}"


@contextmanager
def backend() -> Iterator[tuple[str, Process, str]]:
    """Run a worker with a tiny model, and a Redis. Yield the worker's address and process, and the URL of Redis."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairlead-hostile-")))
        server = stack.enter_context(RedisServer())
        model = make_model(folder / "model", "qwen3", vocab=1024, layers=1)
        settings = {"FAIRLEAD_REDIS_URL": server.url, "FAIRLEAD_INDEX_NAMESPACE": NAMESPACE}
        address, worker = engine_worker(folder, model, "pod-0", **settings)
        stack.callback(worker.kill)
        worker.start()
        until(lambda: _is_ready(address), "the worker is ready")
        yield address, worker, server.url


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> int:
    """Print a line for each kind, and return 1 if a target is missed."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--kinds", default="", help=f"comma-separated (default: all): {', '.join(kind.name for kind in KINDS)}")
    parser.add_argument("--connections", type=int, default=4, help="of the hostile tenant (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.5, help="of each attack (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--search", type=float, default=0.0, metavar="SECONDS", help="search for the costliest input for so long")
    options = parser.parse_args()
    chosen = [name.strip() for name in options.kinds.split(",") if name.strip()] or [kind.name for kind in KINDS]
    if unknown := set(chosen) - {kind.name for kind in KINDS}:
        parser.error(f"--kinds {', '.join(sorted(unknown))}: not known")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with backend() as (address, worker, redis):
        if options.search:
            return _search(address, redis, options)
        measured = []
        for kind in [kind for kind in KINDS if kind.name in chosen]:
            measured.append(measure(kind, address, worker, redis, options))
            print(f"  {kind.name}: p99 {measured[-1][0].p99:.0f} ms", file=sys.stderr, flush=True)
    rows = _with_ratios(measured)
    print(f"{'':18}" + "".join(f"{name:>11}" for name in COLUMNS[:-1]) + f"  {COLUMNS[-1]}")
    for row in rows:
        print(line_of(row))
    missed = [row.kind for row in rows if not row.meets_targets]
    print(f"{len(rows) - len(missed)} of {len(rows)} rows meet the targets" + (f"; not: {', '.join(missed)}" if missed else ""))
    write_report(__name__, options, [asdict(row) for row in rows])
    return 1 if missed else 0


def _with_ratios(measured: Sequence[tuple[Row, list[float]]]) -> list[Row]:
    """Set each row's ratio by the p99 of its target alone over all rows: a single row's second has too few answers."""
    for row, _ in measured:
        alone = [each for other, times in measured for each in times if other.target == row.target]
        row.ratio = row.p99 / percentile(alone, 99)
    return [row for row, _ in measured]


def _search(address: str, redis: str, options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="fairlead-hostile-") as folder, Front(Path(folder), address, redis, "hostile", False) as front:
        pid = front.processes["router"].pid
        found = search(front.port, lambda: cpu_seconds(pid), options.search, options.seed)
    print(f"{'CPU ms/KiB':>12}{'KiB':>8}{'status':>8}  input")
    for trial in found:
        print(f"{trial.cost:>12.3f}{trial.kib:>8.0f}{trial.status:>8}  {trial.recipe}")
    write_report(__name__, options, [asdict(trial) for trial in found])
    return 0
