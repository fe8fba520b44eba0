"""The clients of the hostile benchmark: raw HTTP/1.1 connections, each group in a process of its own."""

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from bench.hostile.inputs import BATCHES, KINDS, MODEL, Kind, post

PROBE_SECONDS = 0.01
GOOD_PAUSE, LONG_PAUSE = 0.02, 0.25
LONG = {"padding": "x" * 280_000}
"""Fields of a good request that routers read like a large one, although its prompt is short."""
RETRY_SECONDS = 0.02
ANSWER_SECONDS = 60.0
GOOD_KEY = "fl-good-key-which-is-random-in-life"
_SPAWN = multiprocessing.get_context("spawn")


class Ended(Exception):
    """The server closed the connection or its answer is not HTTP."""


class Client:
    """One connection, opened when it is needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        return self._streams

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer, also of one that comes before the request is sent. Raises Ended, OSError."""
        reader, writer = await self.open()
        writer.write(request)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status = int(head.split(" ", 2)[1])
            body = await _body(reader, head)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
            self.close()
            raise Ended(str(error)) from error
        if "connection: close" in head:
            self.close()
        return status, body


async def _body(reader: asyncio.StreamReader, head: str) -> bytes:
    fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
    if fields.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(fields.get("content-length", 0)))
    found = b""
    while size := int(await reader.readline(), 16):
        found += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return found


@dataclass
class Seen:
    """What the good tenant and the probes saw: (start in monotonic seconds, seconds) of each request."""

    answers: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By target: completions through the router, and lists of files through the router from the batch server; `long`: see LONG."""
    probes: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By target: its own /health."""
    failed: Counter[str] = field(default_factory=Counter)


@contextmanager
def watching(router: int, batch: int | None) -> Iterator[Callable[[], Seen]]:
    """Run the good tenant and the probes while the context lasts. Yield a function that ends them and returns what they saw."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_watch, args=(router, batch, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(30) and ours.recv() == "ready"

        def end() -> Seen:
            ours.send("end")
            assert ours.poll(30), "the good client's process hangs"
            found: Seen = ours.recv()
            return found

        yield end
    finally:
        process.kill()
        process.join()


def _watch(router: int, batch: int | None, pipe: Pipe) -> None:
    asyncio.run(_watch_all(router, batch, pipe))


async def _watch_all(router: int, batch: int | None, pipe: Pipe) -> None:
    seen, health = Seen(), b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n"
    key = f"\r\nauthorization: Bearer {GOOD_KEY}\r\n".encode()
    completion = _completion(key, {})
    loops = [_repeat(router, health, seen.probes.setdefault("router", []), PROBE_SECONDS, seen.failed)]
    loops += [_repeat(router, completion, seen.answers.setdefault("router", []), GOOD_PAUSE, seen.failed) for _ in range(2)]
    loops += [_repeat(router, _completion(key, LONG), seen.answers.setdefault("long", []), LONG_PAUSE, seen.failed)]
    if batch is not None:
        files = b"GET /v1/files HTTP/1.1\r\nhost: bench" + key + b"\r\n"
        loops += [_repeat(batch, health, seen.probes.setdefault("batch", []), PROBE_SECONDS, seen.failed)]
        loops += [_repeat(router, files, seen.answers.setdefault("batch", []), GOOD_PAUSE, seen.failed) for _ in range(2)]
    tasks = [asyncio.create_task(loop) for loop in loops]
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pipe.send(seen)


def _completion(key: bytes, fields: Mapping[str, str]) -> bytes:
    prompt = "The quick brown fox jumps over the lazy dog. " * 45  # 2 KB: as a chat with a short history
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json" + key
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def _repeat(port: int, request: bytes, into: list[tuple[float, float]], pause: float, failed: Counter[str]) -> None:
    """Send the request again and again. A request that is cut off at the end counts with the time that it has waited."""
    client = Client(port)
    while True:
        began = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                status, _ = await client.ask(request)
            if status != 200:
                failed[str(status)] += 1
        except (Ended, OSError, TimeoutError) as error:
            client.close()
            failed[type(error).__name__] += 1
        finally:
            into.append((began, time.monotonic() - began))
        await asyncio.sleep(pause)


@dataclass
class Sent:
    """What the hostile connections did."""

    requests: int = 0
    bytes: int = 0
    statuses: Counter[str] = field(default_factory=Counter)


@contextmanager
def attacking(kind: Kind, port: int, connections: int, seed: int) -> Iterator[Callable[[float], Sent]]:
    """Build the requests of a kind in a process of its own. Yield a function that sends them for so many seconds."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_attack, args=(kind.name, port, connections, seed, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(60) and ours.recv() == "ready"

        def attack(seconds: float) -> Sent:
            ours.send(seconds)
            assert ours.poll(seconds + 30), f"{kind.name}: the hostile clients' process hangs"
            found: Sent = ours.recv()
            return found

        yield attack
    finally:
        process.kill()
        process.join()


def _attack(name: str, port: int, connections: int, seed: int, pipe: Pipe) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    if kind.computes:
        pipe.send("ready")
        pipe.send(_compute(pipe.recv()))
        return
    _yield_cpu()
    requests = list(kind.build(random.Random(seed)))
    pipe.send("ready")
    pipe.send(asyncio.run(_attack_all(kind, requests, port, connections, pipe.recv())))


def _compute(seconds: float) -> Sent:
    """Keep two processes busy, as many as the router's parsers."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    time.sleep(seconds)
    for program in programs:
        program.kill()
        program.wait()
    return Sent()


def _yield_cpu() -> None:
    """Run only when no other process does: on a machine of its own, this one would take nothing from the servers."""
    os.nice(19)
    with suppress(OSError):  # Linux divides the CPU among sessions before it looks at a process's niceness
        os.setsid()
        Path("/proc/self/autogroup").write_text("19")


async def _attack_all(kind: Kind, requests: list[bytes], port: int, connections: int, seconds: float) -> Sent:
    sent = Sent()
    play = _flood if not kind.reads else _disconnect if kind.disconnects else _ask
    tasks = []
    for number in range(connections):
        first = number * len(requests) // connections
        tasks.append(asyncio.create_task(_forever(play, kind, Client(port), requests[first:] + requests[:first], sent)))
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return sent


Play = Callable[[Kind, Client, bytes, Sent], Awaitable[None]]


async def _forever(play: Play, kind: Kind, client: Client, requests: list[bytes], sent: Sent) -> None:
    for request in itertools.cycle(requests):
        sent.requests += 1
        sent.bytes += len(request)
        try:
            await play(kind, client, request, sent)
        except (Ended, OSError) as error:
            sent.statuses[type(error).__name__] += 1
            client.close()
            await asyncio.sleep(RETRY_SECONDS)


async def _ask(kind: Kind, client: Client, request: bytes, sent: Sent) -> None:
    status, body = await client.ask(request)
    sent.statuses[str(status)] += 1
    if kind.makes_batches and status == 200:
        new = {"input_file_id": json.loads(body)["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        sent.statuses[f"batch {(await client.ask(post(BATCHES, new)))[0]}"] += 1


async def _disconnect(kind: Kind, client: Client, request: bytes, sent: Sent) -> None:
    _, writer = await client.open()
    writer.write(request)
    await writer.drain()
    await asyncio.sleep(0.002)
    client.close()


async def _flood(kind: Kind, client: Client, request: bytes, sent: Sent) -> None:
    reader, writer = await client.open()
    reader._transport.pause_reading()  # type: ignore[attr-defined]  # StreamReader would read up to its limit
    writer.write(request)
    await writer.drain()
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()
