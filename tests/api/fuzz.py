"""Thousands of malformed and extreme requests to a worker and through a router, with valid requests beside them.

python -m tests.api.fuzz --count 20000 --seed 1

Bodies come from the OpenAPI document that the worker serves; one request in ten is bytes on a bare socket. No request may get a 5xx or no
answer, streams must end as their kind does, valid requests of every kind must all succeed with the same answer every time, and in the end
pages, requests, descriptors and memory must be where they were.

The generator is our own for two reasons. A schema does not describe grammars, conversations, forced calls or clients that disconnect.
Sixteen concurrent requests are no single example that could be shrunk; a seed repeats what is drawn. `by_schema.py` runs schemathesis on
the document itself.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tests.api.answers import check_ending, from_stream, from_whole, is_close
from tests.api.bodies import HI, Bodies
from tests.api.fleet import Pair
from tests.api.raw import raw

from fairlead_common.protocols.paths import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RERANKS, RESPONSES, SCORES

AT_ONCE = 16
HANGS = 180.0
"""Seconds for one answer, on a machine that also does other work."""
MOST_FAULTS = 20
GROWTH_MIB = 96
"""Memory growth of a process after the first tenth of the run: allocators keep what they used at their peak."""
ROUTER_FLAGS = ("--console", "--header-timeout", "20", "--body-timeout", "20")
WORKER_FLAGS = ("--limits", "header_timeout=20,body_timeout=20")
FUNCTION = {"name": "pick", "parameters": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}}
SHORT = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
RESPONSE = {"input": "hi", "max_output_tokens": 5, "temperature": 0, "ignore_eos": True}
CALL = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 60, "temperature": 0}
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "a good request", "max_tokens": 6, "temperature": 0, "ignore_eos": True}),
    (COMPLETIONS, {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True}),
    (CHAT, {"messages": HI, **SHORT}),
    (CHAT, {"messages": HI, **SHORT, "temperature": 1, "seed": 3, "stream": True}),
    (CHAT, {"messages": HI, **SHORT, "reasoning_effort": "low", "stream": True}),
    (CHAT, {"messages": HI, **CALL}),
    (CHAT, {"messages": HI, **CALL, "stream": True}),
    (RESPONSES, RESPONSE),
    (RESPONSES, {**RESPONSE, "reasoning": {"effort": "low"}, "stream": True}),
    (MESSAGES, {"messages": HI, **SHORT}),
    (MESSAGES, {"messages": HI, **SHORT, "stream": True}),
    (COUNT_TOKENS, {"messages": HI}),
    (EMBEDDINGS, {"input": ["a good request", "another"]}),
    (SCORES[0], {"text_1": "a good request", "text_2": ["another", "a good request"]}),
    (RERANKS[0], {"query": "a good request", "documents": ["another", "a good request"]}),
)


@dataclass(slots=True)
class Report:
    """The counts and faults of a run."""

    statuses: Counter[str] = field(default_factory=Counter)
    good: int = 0
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Fuzz:
    """One run."""

    def __init__(self, pair: Pair, document: dict[str, Any], seed: int) -> None:
        self._pair = pair
        self._draw = random.Random(seed)
        self._bodies = Bodies(document, self._draw)
        self._expected: dict[int, Any] = {}
        self.report = Report()

    async def run(self, count: int) -> Report:
        """Send `count` requests, valid or invalid at random, and valid ones beside them until the others are done."""
        report, began = self.report, time.monotonic()
        async with _session() as session, _session() as another:
            for index in range(len(GOOD)):
                await self._good(another, index, 0)
            good = asyncio.create_task(self._keep_asking(another))
            left = iter(range(count))
            try:
                await self._workers(session, left, count // 10)
                report.before = await asyncio.to_thread(self._pair.held)
                await self._workers(session, left, count)
            finally:
                good.cancel()
                await asyncio.gather(good, return_exceptions=True)
        report.after = await self._settled()
        report.seconds = time.monotonic() - began
        self._compare()
        return report

    async def _workers(self, session: aiohttp.ClientSession, left: Any, until: int) -> None:
        async def work() -> None:
            for number in left:
                if len(self.report.faults) >= MOST_FAULTS or not self._pair.alive:
                    return
                await self._one(session)
                if number % 1000 == 999:
                    print(f"{number + 1} requests, {len(self.report.faults)} faults", file=sys.stderr, flush=True)
                if number + 1 >= until:
                    return

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        if not self._pair.alive:
            self.report.faults.append("a process has ended")

    async def _one(self, session: aiohttp.ClientSession) -> None:
        draw, began = self._draw, time.monotonic()
        url = draw.choice(self._pair.urls)
        if draw.random() < 0.1:
            sent, path = raw(draw), "raw"
        else:
            path, sent = self._bodies.operation()
        patience = draw.choice((0.0, 0.01, 0.1)) if draw.random() < 0.05 else None
        try:
            async with asyncio.timeout(HANGS):
                if path == "raw":
                    await self._bytes(url, sent)
                else:
                    await self._body(session, url, path, sent, patience)
        except TimeoutError:
            self._fault(f"no answer in {HANGS:.0f} s", url, path, sent)
        except (aiohttp.ClientError, ConnectionError) as error:
            self._fault(f"{type(error).__name__}: {error}", url, path, sent)
        self.report.slowest = max(self.report.slowest, time.monotonic() - began)

    async def _body(self, session: aiohttp.ClientSession, url: str, path: str, sent: bytes, patience: float | None) -> None:
        headers = {"content-type": self._draw.choice(("application/json", "application/json", "text/plain", "x/y; charset=utf-16"))}
        if patience is not None:  # a client that disconnects
            try:
                async with asyncio.timeout(patience), session.post(url + path, data=sent, headers=headers) as response:
                    await response.read()
            except TimeoutError:
                self.report.statuses["gone"] += 1
                return
            self.report.statuses[str(response.status)] += 1
            return
        async with session.post(url + path, data=sent, headers=headers) as response:
            data = await response.read()
            self.report.statuses[str(response.status)] += 1
            if wrong := _find_fault(path, response.status, response.headers.get("content-type", ""), data):
                self._fault(wrong, url, path, sent)

    async def _bytes(self, url: str, sent: bytes) -> None:
        """Send the bytes, half-close, and read to the end."""
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(sent)
            if self._draw.random() < 0.7:
                writer.write_eof()
                data = await reader.read()
            else:  # or disconnect without reading
                await writer.drain()
                data = b""
        except ConnectionError:
            data = b""  # refused while it was still being sent
        finally:
            writer.close()
        status = data[9:12].decode("latin-1") if data.startswith(b"HTTP/1.") else "no answer"
        self.report.statuses[f"raw {status}"] += 1
        if status.startswith("5"):
            self._fault(f"status {status}", url, "raw", sent)

    async def _keep_asking(self, session: aiohttp.ClientSession) -> None:
        for number in range(10**9):
            await self._good(session, number % len(GOOD), number // len(GOOD) % 2)

    async def _good(self, session: aiohttp.ClientSession, index: int, place: int) -> None:
        (path, body), url = GOOD[index], self._pair.urls[place]
        try:
            async with session.post(url + path, json=body) as response:
                data = await response.text()
            said = _extract(path, body, data) if response.status == 200 else f"status {response.status}: {data[:300]}"
        except (aiohttp.ClientError, TimeoutError, AssertionError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        if isinstance(said, dict) and is_close(said, self._expected.setdefault(index, said)):
            self.report.good += 1
        else:
            self._fault(f"a good request: {said!r}, and before {self._expected.get(index)!r}", url, path, json.dumps(body).encode())

    async def _settled(self, seconds: float = 90) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            held = await asyncio.to_thread(self._pair.held)
            back = all(held[name] <= self.report.before.get(name, 0) + 2 for name in held if name.endswith("descriptors"))
            if (back and not held["pages"] and not held["requests"]) or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.2)

    def _compare(self) -> None:
        for name, now in self.report.after.items():
            before = self.report.before.get(name, 0)
            allowed = before + GROWTH_MIB if name.endswith("MiB") else before + 2 if name.endswith("descriptors") else 0
            if now > allowed:
                self.report.faults.append(f"leaked: {name} was {before} and is {now}")

    def _fault(self, what: str, url: str, path: str, sent: bytes) -> None:
        where = "worker" if url == self._pair.urls[0] else "router"
        self.report.faults.append(f"{where} {path}: {what}: {sent[:600]!r}")
        print(self.report.faults[-1][:1000], file=sys.stderr, flush=True)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(HANGS))


def _find_fault(path: str, status: int, kind: str, data: bytes) -> str:
    """Return what is wrong with an answer, or an empty string."""
    if status >= 500:
        return f"status {status}: {data[:300]!r}"
    if kind.startswith("text/event-stream"):
        return check_ending(path, data.decode())
    try:
        document = json.loads(data)
    except ValueError:
        return f"status {status} with what is no JSON: {data[:300]!r}"
    if status >= 400 and not document.get("error", {}).get("message"):
        return f"status {status} with no message: {data[:300]!r}"
    return ""


def _extract(path: str, body: dict[str, Any], data: str) -> dict[str, Any]:
    """Return the part of an answer that is the same each time: without usage of the cache."""
    said = from_stream(path, data) if body.get("stream") else from_whole(path, json.loads(data))
    return {name: value for name, value in said.items() if name != "usage"}


def fuzz(folder: Path, count: int, seed: int) -> Report:
    """Start the processes, run, and stop them."""
    with Pair(folder, *WORKER_FLAGS, router_flags=ROUTER_FLAGS) as pair:
        document = pair.worker.client.get("/openapi.json").json()
        return asyncio.run(Fuzz(pair, document, seed).run(count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = fuzz(Path(folder), arguments.count, arguments.seed)
    print(f"{arguments.count} requests in {report.seconds:.0f} s, the slowest {report.slowest:.1f} s; {report.good} good ones beside them")
    print("answers: " + ", ".join(f"{status} {count}" for status, count in sorted(report.statuses.items())))
    for name in report.after:
        print(f"{name}: {report.before.get(name)} -> {report.after[name]}")
    print(f"faults: {len(report.faults)}")
    for fault in report.faults:
        print(f"  {fault[:1000]}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
