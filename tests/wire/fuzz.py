"""Millions of generated and mutated byte streams against the router and the worker.

python -m tests.wire.fuzz --count 2000000 --seed 1

The report has two parts. In process: the connection classes of both servers read every stream, split at random positions, and the messages
that they find are compared with h11's (where both accept a message, it must be the same one at the same place). Over sockets: one stream in
a hundred goes to a router process and to a worker process with a real engine, with a well-behaved client beside them. No process may end or
log an error, and the client's slowest answer, memory and descriptors are bounded.
"""

import argparse
import asyncio
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import uvloop
from tests.api.fleet import Pair
from tests.wire import boundaries
from tests.wire.streams import splits, stream

SOCKET_SHARE = 100
AT_ONCE = 32
BATCH = 1000
ANSWER_SECONDS = 10.0
GROWTH_MIB = 64
GROWTH_DESCRIPTORS = 16
ROUTER_FLAGS = ("--header-timeout", "5", "--body-timeout", "5")
WORKER_FLAGS = ("--limits", "header_timeout=5,body_timeout=5")
FAULTS = ("internal error of the router", "Exception in ASGI application", "Traceback", "Fatal")
COMPLETION = {"prompt": "x", "max_tokens": 1}


async def batch(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Compare `count` streams in process. Return the messages found by each parser, and the disagreements."""
    boundaries.quiet()
    draw = random.Random(seed)
    servers = {side: boundaries.Server(side) for side in ("router", "worker")}
    found: Counter[str] = Counter()
    wrong = []
    for _ in range(count):
        said, messages = await boundaries.compare(stream(draw), draw, servers)
        found.update(messages)
        if said:
            wrong.append(said)
    return found, wrong


def _batch(task: tuple[int, int]) -> tuple[Counter[str], list[str]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(batch(*task))


def in_process(count: int, seed: int, processes: int) -> list[str]:
    """Compare `count` streams, with progress. Return the disagreements."""
    tasks = [(min(BATCH, count - at), seed * 1_000_003 + at) for at in range(0, count, BATCH)]
    began = told = time.monotonic()
    total: Counter[str] = Counter()
    wrong: list[str] = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, (found, said) in enumerate(pool.imap_unordered(_batch, tasks), start=1):
            total.update(found)
            wrong += said
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"  {done * BATCH:,} of {count:,} streams, {done * BATCH / (told - began):,.0f}/s, {len(wrong)} disagree", flush=True)
    print(f"in process: {count:,} streams, {len(wrong)} disagree with h11; messages: {dict(total)}; {time.monotonic() - began:.0f} s")
    return wrong


async def over_sockets(pair: Pair, count: int, seed: int, quiet: bool = False) -> list[str]:
    """Send `count` streams to each process, with one good client each. Return the faults."""
    draw = random.Random(seed)
    wrong: list[str] = []
    slowest = dict.fromkeys(pair.urls, 0.0)
    good, stop = Counter[str](), asyncio.Event()

    async def send(port: int, pieces: list[bytes]) -> None:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(OSError):
                for piece in pieces:
                    if writer.is_closing():
                        break
                    writer.write(piece)
                    await asyncio.sleep(0)
                writer.write_eof()
                async with asyncio.timeout(3 * ANSWER_SECONDS):
                    while await reader.read(65536):
                        pass
            writer.transport.abort()

    async def be_good(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=6 * ANSWER_SECONDS) as client:
            while not stop.is_set():
                for ask in (client.get("/health"), client.post("/v1/completions", json=COMPLETION)):
                    began = time.monotonic()
                    answer = await ask
                    slowest[url] = max(slowest[url], time.monotonic() - began)
                    good[url] += 1
                    if answer.status_code != 200:
                        wrong.append(f"a good client of {url} got {answer.status_code}: {answer.text[:300]}")
                await asyncio.sleep(0.02)

    async def go_on(todo: list[tuple[int, list[bytes]]]) -> None:
        while todo:
            await send(*todo.pop())

    ports = (pair.router_port, pair.worker.port)
    todo = [(port, splits(draw, stream(draw))) for _ in range(count) for port in ports]
    warm, todo = todo[: len(todo) // 5], todo[len(todo) // 5 :]
    clients = [asyncio.create_task(be_good(url)) for url in pair.urls]
    await asyncio.gather(*(go_on(warm) for _ in range(AT_ONCE)))
    before = pair.held()
    sending = asyncio.gather(*(go_on(todo) for _ in range(AT_ONCE)))
    while not sending.done():
        await asyncio.wait([sending], timeout=10)
        if not quiet:
            print(f"  over sockets: {len(todo):,} streams left", flush=True)
    stop.set()
    for outcome in await asyncio.gather(*clients, return_exceptions=True):
        if isinstance(outcome, BaseException):
            wrong.append(f"a good client failed: {type(outcome).__name__}: {outcome}")
    if not pair.alive:
        return [*wrong, "a process has ended"]
    after = pair.held()
    wrong += [f"{name}: {before[name]} before, {held} after" for name, held in after.items() if held - before[name] > _bound(name)]
    wrong += [f"the slowest answer of {url} took {seconds:.1f} s" for url, seconds in slowest.items() if seconds > ANSWER_SECONDS]
    for log in (pair.router_log, pair.worker.log):
        wrong += [f"{log.name}: {line}" for line in log.read_text(errors="replace").splitlines() if any(fault in line for fault in FAULTS)][
            :5
        ]
    late = max(slowest.values())
    print(f"over sockets: {count:,} streams to each process; {sum(good.values())} good answers, the slowest after {late:.2f} s")
    print(f"  before {before}")
    print(f"  after  {after}")
    return wrong


def _bound(name: str) -> int:
    if name.endswith("MiB"):
        return GROWTH_MIB
    return GROWTH_DESCRIPTORS if name.endswith("descriptors") else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2_000_000, help="streams in process; one in a hundred goes over sockets too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    wrong: list[Any] = in_process(options.count, options.seed, options.processes)
    with tempfile.TemporaryDirectory() as folder, Pair(Path(folder), *WORKER_FLAGS, router_flags=ROUTER_FLAGS) as pair:
        wrong += asyncio.run(over_sockets(pair, max(1, options.count // SOCKET_SHARE), options.seed))
    for line in wrong[:20]:
        print(line[:2000])
    print(f"{len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
