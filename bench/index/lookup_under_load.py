"""Latency of `match` for 8 routers while real writers store a given number of blocks per second.

Each router is a separate process with one connection. It calls `match` for prompts of lognormal length (median 64 blocks, up to
2,048; half of each is held), at random moments. The writers are `IndexWriter`s, 8 pods in two processes. In a
cluster all of them have their own cores. Here the server has the highest priority, then the routers, then the writers, then the rest of
the machine, where SCHED_RR is permitted. Without it the latency of a busy machine itself is measured.

The same processes also measure what is not the index's own cost, at random moments too. A bare PING waits behind the writers as a
`match` does, and is answered immediately. A PING to a second, idle server of the same priority waits for the machine alone.
"""

import asyncio
import multiprocessing
import os
import random
import socket
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier, Event
from typing import Any

import hiredis
import redis
import uvloop
from tests.servers.redis_server import RedisServer

from bench.common.report import make_parser, write_report
from fairlead_index.hashing import hash_bytes
from fairlead_index.redis.scripts import SCHEMA, script_source
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter

ROUTERS = 8
ASKS_PER_SECOND = 40  # each router: 320 requests a second in all
KINDS = ("match", "ping", "machine")  # each as often
PODS, PROCESSES = 8, 2
NAMESPACE = "bench/load"
BLOCK_TOKENS = 64
PREFIX = f"{SCHEMA}:{{{NAMESPACE}}}:"
PROMPTS = 200
LONGEST = 2048
SERVER, ROUTER, WRITER = 30, 20, 10
TICK = 0.005

context = multiprocessing.get_context("spawn")
Numbers = dict[str, float]


class Wire:
    """A minimal client: it sends bytes and parses replies."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def ask(self, request: bytes, replies: int) -> list[object]:
        """Send one request of `replies` commands. Read while writing, because a reply may exceed the socket's buffer."""
        reader = hiredis.Reader()
        found: list[object] = []
        sent = 0
        self._socket.setblocking(False)
        while len(found) < replies:
            if sent < len(request):
                try:
                    sent += self._socket.send(request[sent : sent + 262144])
                except BlockingIOError:
                    pass
            try:
                if sent == len(request):
                    self._socket.setblocking(True)
                reader.feed(self._socket.recv(1 << 20))
            except BlockingIOError:
                continue
            while (reply := reader.gets()) is not False:
                if isinstance(reply, Exception):
                    raise reply
                found.append(reply)
        return found


def commands(client: redis.Redis, *names: str) -> list[tuple[str, str]]:
    """Return (command, digest) of each script, by which `Scripts` calls it too."""
    return [("EVALSHA", client.script_load(script_source(name))) for name in names]


def take_precedence(pid: int, precedence: int) -> bool:
    """Raise the priority of a process (0: this one). Return whether that is permitted."""
    if precedence:
        try:
            os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(precedence))
        except (OSError, AttributeError):
            return False
    return True


def cpu_seconds(client: "redis.Redis") -> float:
    """Return the CPU time of the server so far."""
    spent = client.info("cpu")
    return float(spent["used_cpu_user"] + spent["used_cpu_sys"])


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def prompt(number: int) -> "array[int]":
    """Return the blocks of a prompt that routers look up."""
    draw = random.Random(number)
    return array("Q", draw.randbytes(8 * max(1, min(LONGEST, int(draw.lognormvariate(4.16, 1.2))))))


def held(pod: int) -> list["array[int]"]:
    """Return the blocks that a pod holds at the start: a random part of a quarter of the prompts."""
    draw = random.Random(10_000 + pod)
    chosen = [prompt(number) for number in draw.sample(range(PROMPTS), PROMPTS // 4)]
    return [chain[: max(1, int(len(chain) * draw.random()))] for chain in chosen]


def write(path: str, pods: list[int], rate: float, started: Event, stop: Event, report: Any) -> None:
    """Run one process of pods. `rate`: blocks that each stores per second."""

    take_precedence(0, WRITER)

    async def one(pod: int) -> IndexWriter:
        card = WorkerCard(f"pod-{pod}", f"10.2.0.{pod}:8000", BLOCK_TOKENS)
        writer = IndexWriter(f"unix://{path}", NAMESPACE, card)
        for chain in held(pod):
            writer.store(chain)
        writer.report(WorkerLoad(prefill_rate=8000.0, backlog_tokens=random.randrange(20_000)))
        writer.start()
        return writer

    async def fill(pod: int, writer: IndexWriter, began: float) -> tuple[int, float]:
        """Blocks at moments of the pod's own: pods know nothing of each other. Returns how many, and CPU seconds of the engine's calls."""
        draw, stored, engine = random.Random(pod), 0, 0.0
        while not stop.is_set():
            await asyncio.sleep(draw.expovariate(1 / TICK))
            due = int((time.perf_counter() - began) * rate) - stored
            if due < 1:
                continue
            chain = array("Q", draw.randbytes(8 * due))
            before = time.thread_time()
            writer.store(chain)
            engine += time.thread_time() - before
            stored += due
        return stored, engine

    async def life() -> None:
        writers = [await one(pod) for pod in pods]
        while not all(writer.joined and not writer.stats.pending for writer in writers):  # noqa: ASYNC110  # a writer has no event for it
            await asyncio.sleep(0.01)
        started.set()
        began, spent = time.perf_counter(), time.process_time()
        costs = await asyncio.gather(*(fill(pod, writer, began) for pod, writer in zip(pods, writers, strict=True)))
        stored, engine = (sum(each) for each in zip(*costs, strict=True))
        seconds, told = time.perf_counter() - began, sum(writer.stats.blocks for writer in writers)
        report.put(
            {
                "blocks_per_s": stored / seconds,
                "acknowledged_per_s": told / seconds,
                "batches_per_s": sum(writer.stats.batches for writer in writers) / seconds,
                "engine_ns_per_block": 1e9 * engine / max(1, stored),
                "writer_cores": (time.process_time() - spent) / seconds,
                "pending": sum(writer.stats.pending for writer in writers),
                "joins": sum(writer.stats.joins for writer in writers),
            }
        )
        await asyncio.gather(*(writer.leave() for writer in writers))

    uvloop.run(life())


def ask(path: str, idle: str, scripts: list[tuple[str, str]], router: int, seconds: float, together: Barrier, report: Any) -> None:
    """Run one router for some seconds. Return the microseconds of each `match`, each PING, and each PING to the idle server."""
    take_precedence(0, ROUTER)
    wire, beside, draw = Wire(path), Wire(idle), random.Random(router)
    prompts = [hash_bytes(prompt(number)) for number in range(PROMPTS)]
    [match] = ((*script, 1, PREFIX) for script in scripts)
    ping = hiredis.pack_command(("PING",))
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    together.wait(60)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        time.sleep(draw.expovariate(len(KINDS) * ASKS_PER_SECOND))
        kind, hashes = draw.choice(KINDS), draw.choice(prompts)
        request = ping
        if kind == "match":
            request = hiredis.pack_command((*match, hashes))
        asked = beside if kind == "machine" else wire
        began = time.perf_counter()
        [reply] = asked.ask(request, 1)
        times[kind].append(1e6 * (time.perf_counter() - began))
        assert kind != "match" or isinstance(reply, list)
    report.put(times)


@contextmanager
def server() -> Iterator[str]:
    """Run a Redis with the highest priority and yield its unix socket."""
    with RedisServer(os.environ.get("REDIS_VERSION", "6.2"), unix_socket=True) as redis_server:
        take_precedence(redis_server.pid, SERVER)
        yield redis_server.url.removeprefix("unix://")


@contextmanager
def writing(path: str, blocks_per_second: float) -> Iterator[Callable[[], Numbers]]:
    """Run writers. The yielded function stops them and returns their figures."""
    stop, report, processes = context.Event(), context.Queue(), []
    for n in range(PROCESSES):
        started = context.Event()
        pods = list(range(n, PODS, PROCESSES))
        processes.append(context.Process(target=write, args=(path, pods, blocks_per_second / PODS, started, stop, report), daemon=True))
        processes[-1].start()
        if not started.wait(60):
            raise RuntimeError("the writers did not start within a minute")

    def end() -> Numbers:
        stop.set()
        parts = [report.get(timeout=60) for _ in processes]
        found = {key: sum(part[key] for part in parts) for key in parts[0]}
        return found | {"engine_ns_per_block": found["engine_ns_per_block"] / len(parts)}

    try:
        yield end
    finally:
        stop.set()
        for process in processes:
            process.join(10)
            process.kill()


def measure(path: str, idle: str, blocks_per_second: float, seconds: float, progress: bool = True) -> Numbers:
    """Run routers and writers at the same time. `idle`: a server without other load."""
    if progress:
        print(f"   {ROUTERS} routers, {blocks_per_second:,.0f} blocks/s for {seconds:.0f} s ...", flush=True)
    client = redis.Redis(unix_socket_path=path)
    report = context.Queue()
    with writing(path, blocks_per_second) as end:
        scripts = commands(client, "match")
        together = context.Barrier(ROUTERS + 1)
        routers = [
            context.Process(target=ask, args=(path, idle, scripts, n, seconds, together, report), daemon=True) for n in range(ROUTERS)
        ]
        for router in routers:
            router.start()
        together.wait(60)
        spent, busy, began = cpu_seconds(client), machine_seconds(), time.perf_counter()
        parts = [report.get(timeout=seconds + 60) for _ in routers]
        wall = time.perf_counter() - began
        server = (cpu_seconds(client) - spent) / wall
        cores = (machine_seconds() - busy) / wall
        wrote = end()
    client.flushall()
    times = {kind: [value for part in parts for value in part[kind]] for kind in KINDS}
    return {
        "p50_us": percentile(times["match"], 0.5),
        "p90_us": percentile(times["match"], 0.9),
        "p99_us": percentile(times["match"], 0.99),
        "ping_p50_us": percentile(times["ping"], 0.5),
        "ping_p99_us": percentile(times["ping"], 0.99),
        "machine_p50_us": percentile(times["machine"], 0.5),
        "machine_p99_us": percentile(times["machine"], 0.99),
        "asks_per_s": len(times["match"]) / seconds,
        "server_cores": server,
        "machine_cores": cores,
        "cores": os.cpu_count() or 1,
        **wrote,
    }


def machine_seconds() -> float:
    """Return the CPU seconds that all processes of this machine have used."""
    with open("/proc/stat") as stat:  # noqa: PTH123  # not a file of ours
        user, nice, system, _, _, irq, soft, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run (default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[1000.0, 100_000.0], help="blocks written a second")
    options = parser.parse_args()
    runs: dict[str, Numbers] = {}
    for rate in options.rates:
        with server() as path, server() as idle:
            runs[f"{rate:,.0f} blocks/s"] = measure(path, idle, rate, options.seconds)
    figures = list(next(iter(runs.values())))
    print(f"{'':24}" + "".join(f"{name:>20}" for name in runs))
    for figure in figures:
        print(f"{figure:24}" + "".join(f"{run[figure]:20.1f}" for run in runs.values()))
    write_report(__name__, options, runs)
