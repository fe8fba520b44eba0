"""Stand-ins for many workers in a few processes: each process serves one address of 127.0.0.0/8 for each of its workers.

They answer health checks, the prompt format by its ETag, and completions, all at once. A worker costs its process a socket and a few KB.
"""

import asyncio
import gzip
import json
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final, cast

import msgspec
import uvloop
from tests.router.prompt_format import encoded, make_format

PORT: Final = 18080
BACKLOG: Final = 16


def addresses(count: int) -> list[str]:
    """Return the addresses of `count` workers."""
    return [f"127.{1 + number // 62500}.{number // 250 % 250}.{1 + number % 250}:{PORT}" for number in range(count)]


class _Connection(asyncio.Protocol):
    """One connection to one worker. Requests come one at a time, and their bodies are not read."""

    def __init__(self, answers: dict[bytes, bytes], tag: bytes) -> None:
        self._answers, self._tag, self._data = answers, tag, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0) if end else 0
        if not end or len(body) < length:
            return
        path, self._data = head.split(b" ", 2)[1], b""
        unchanged = path == b"/internal/prompt-format" and self._tag in head
        self._transport.write(self._answers[b"unchanged"] if unchanged else self._answers.get(path, self._answers[b""]))


def _answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def _serve(listed: list[str], ready: Connection) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        body, tag = encoded(make_format("bench"))
        shared = {
            b"/ready": _answer(b'{"ready":true}'),
            b"/internal/prompt-format": _answer(gzip.compress(body), f"etag: {tag}", "content-encoding: gzip"),
            b"unchanged": f"HTTP/1.1 304 Not Modified\r\netag: {tag}\r\n\r\n".encode(),
            b"": _answer(json.dumps({"object": "text_completion", "choices": [{"index": 0, "text": " one"}]}).encode()),
        }
        for address in listed:
            host, _, port = address.partition(":")
            load = {"pod": f"pod-{host}", "address": address, "ready": True, "prefill_rate": 4000.0, "pages_free": 900, "pages_total": 1000}
            answers = shared | {b"/load": _answer(msgspec.json.encode(load))}
            listener = socket.create_server((host, int(port)), backlog=BACKLOG)
            await loop.create_server(lambda answers=answers: _Connection(answers, tag.encode()), sock=listener)  # type: ignore[misc]
        ready.send(True)
        await asyncio.Event().wait()

    uvloop.run(run())


@contextmanager
def fake_fleet(count: int, processes: int = 2) -> Iterator[list[str]]:
    """Serve `count` workers from `processes` processes. Return their addresses."""
    listed, context = addresses(count), multiprocessing.get_context("spawn")
    started = []
    try:
        for number in range(processes):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(listed[number::processes], there), daemon=True)
            process.start()
            started.append(process)
            assert here.recv()
        yield listed
    finally:
        for process in started:
            process.terminate()
            process.join()
