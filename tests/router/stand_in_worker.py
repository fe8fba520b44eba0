"""A worker without an engine: real sockets, the worker's HTTP contract, and a behaviour that the test chooses."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from tests.router.prompt_format import encoded, make_format

from fairlead_common.prompts.encoder import PromptFormat
from fairlead_index.hashing import block_hashes, prompt_root, tokens_from_bytes
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    tokens: "list[int] | None"
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)


@dataclass
class Exchange:
    """One request at the worker, for a behaviour to answer."""

    worker: "StandIn"
    request: Received
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    cached: int = 0
    backlog: int = 0
    hashes: Sequence[int] = ()

    def begun(self) -> None:
        """Mark the prompt as computed: it enters the worker's cache and leaves its backlog."""
        self.worker.computed(self.backlog, self.hashes)
        self.backlog, self.hashes = 0, ()

    async def head(self, status: int = 200, length: int | None = None, kind: str = "text/event-stream", **extra: str) -> None:
        self.begun()
        lines = [
            f"HTTP/1.1 {status} X",
            f"content-type: {kind}",
            f"x-fairlead-pod: {self.worker.pod}",
        ]
        if self.worker.tells_cached:
            lines.append(f"x-fairlead-cached-tokens: {self.cached}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in extra.items()]
        lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
        self.writer.write("\r\n".join([*lines, "", ""]).encode())
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, text: str) -> None:
        await self.chunk(b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n")

    async def end(self) -> None:
        await self.chunk(b"data: [DONE]\n\n")
        await self.chunk(b"")

    async def whole(self, status: int, body: dict, **extra: str) -> None:
        data = json.dumps(body).encode()
        await self.head(status, len(data), "application/json", **extra)
        self.writer.write(data)
        await self.writer.drain()

    def die(self) -> None:
        """Reset the connection, as a killed process does."""
        self.writer.transport.abort()

    async def until_client_gone(self) -> None:
        await self.reader.read()


Behaviour = Callable[[Exchange], Awaitable[None]]


async def answers(exchange: Exchange) -> None:
    """Send five tokens, streamed if requested."""
    if exchange.request.json.get("stream"):
        await exchange.head()
        for number in range(5):
            await exchange.event(f" {number}")
        await exchange.end()
    else:
        await exchange.whole(200, {"object": "text_completion", "choices": [{"index": 0, "text": " 0 1 2 3 4"}]})


async def streams_usage(exchange: Exchange) -> None:
    """Stream two tokens as an agent does: the usage with the cached tokens is a comment near the end, if the router asks for it."""
    await exchange.head()
    for number in range(2):
        await exchange.event(f" {number}")
    if exchange.request.headers.get("x-fairlead-usage") == "1":
        await exchange.chunk(b": usage %d 2 %d\n\n" % (len(exchange.request.tokens or ()), exchange.cached))
    await exchange.end()


async def drains(exchange: Exchange) -> None:
    exchange.worker.ready = False
    await exchange.whole(503, {"error": {"message": "draining"}}, x_fairlead_retry="other")


async def dies_at_once(exchange: Exchange) -> None:
    exchange.die()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return bytes(body)


def answers_when_all_have_come(requests: int) -> Behaviour:
    """Hold every answer until `requests` have arrived: the burst is simultaneous, however slow the machine is."""
    arrived, everybody = 0, asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == requests:
            everybody.set()
        await everybody.wait()
        await answers(exchange)

    return waits


@dataclass
class StandIn:
    pod: str = "pod"
    format: PromptFormat = field(default_factory=make_format)
    behaviour: Behaviour = answers
    ready: bool = True
    load: dict = field(default_factory=dict)
    redis: tuple[str, str] | None = None
    """URL and namespace of an index to write to."""
    received: list[Received] = field(default_factory=list)
    stopped: bool = False
    """Health checks get no answer, as after SIGSTOP."""
    backlog: int = 0
    """Prompt tokens of requests whose answer has not begun."""
    lease: float = 2.0
    """Seconds that the index trusts the worker without a renewal."""
    reports: bool = True
    """Whether load is reported to the index."""
    gone: int = 0
    """Number of requests whose client disconnected before the end."""
    format_fetches: int = 0
    formats_sent: int = 0
    tells_cached: bool = True
    """Whether the head of an answer has the cached tokens. An agent knows them at the end of a stream only."""
    packs: bool = True
    """Whether the prompt format is sent with gzip to clients that accept it."""
    tells: bool = True
    """Whether stored blocks are published to the index."""
    schedule: bytes | None = None
    """The end of the trace of steps."""
    address: str = ""
    host: str = "127.0.0.1"

    async def start(self, port: int = 0) -> "StandIn":
        self._cache: set[int] = set()
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task] = set()
        self._server = await asyncio.start_server(self._serve, self.host, port, limit=1 << 24)
        self.address = f"{self.host}:{self._server.sockets[0].getsockname()[1]}"
        self._index = None
        if self.redis:
            url, namespace = self.redis
            self._index = IndexWriter(url, namespace, WorkerCard(self.pod, self.address, self.format.block_tokens), self.lease)
            self._index.start()
            reporting = asyncio.create_task(self._report(self._index))
            self._tasks.add(reporting)
        return self

    async def _report(self, index: IndexWriter) -> None:
        """Report load as an engine's heartbeat does. It ends reservations that no router releases (its call timed out, and Redis had made
        them)."""
        while True:
            if self.reports:
                index.report(msgspec.convert({"backlog_tokens": self.backlog, **self.load}, WorkerLoad))
            await asyncio.sleep(0.2)

    def computed(self, tokens: int, hashes: Sequence[int]) -> None:
        self.backlog -= tokens
        self._cache.update(hashes)
        if self._index is not None and self.tells:
            self._index.store(hashes)

    @property
    def joined(self) -> bool:
        return self._index is not None and self._index.joined

    async def kill(self) -> None:
        """Close the port and reset every connection without telling the index."""
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.leave_index(0.2)

    async def leave_index(self, timeout: float = 2.0) -> None:
        index, self._index = self._index, None
        if index is not None:
            await index.leave(timeout)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *fields = head.decode("latin-1").strip().split("\r\n")
                method, path, _ = line.split(" ")
                headers = {name.lower(): value for name, value in (entry.split(": ", 1) for entry in fields)}
                body = await _body(reader, headers)
                await self._handle(method, path, headers, body, reader, writer)
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._connections.discard(writer)
            writer.transport.abort()

    async def _handle(
        self, method: str, path: str, headers: dict, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        exchange = Exchange(self, Received(path, headers, None, body), reader, writer)
        if self.stopped:
            await exchange.until_client_gone()
            return
        if path == "/ready":
            await exchange.whole(200 if self.ready else 503, {"ready": self.ready})
        elif path == "/load":
            await exchange.whole(
                200,
                {
                    "pod": self.pod,
                    "address": self.address,
                    "draining": False,
                    "ready": self.ready,
                    "backlog_tokens": self.backlog,
                    "incarnation": self._index.incarnation if self._index is not None else "",
                    **self.load,
                },
            )
        elif path == "/internal/schedule":
            if self.schedule is None:
                await exchange.whole(404, {"error": {"message": "this worker writes no trace of its steps"}})
            else:
                await exchange.head(200, len(self.schedule), "text/plain")
                writer.write(self.schedule)
        elif path == "/internal/prompt-format":
            self.format_fetches += 1
            data, tag = encoded(self.format)
            if tag in headers.get("if-none-match", ""):
                writer.write(f"HTTP/1.1 304 Not Modified\r\netag: {tag}\r\n\r\n".encode())
                return
            packed = {"content_encoding": "gzip"} if self.packs and "gzip" in headers.get("accept-encoding", "") else {}
            data = gzip.compress(data) if packed else data
            await exchange.head(200, len(data), "application/json", etag=tag, **packed)
            writer.write(data)
            self.formats_sent += 1
        else:
            await self._prompt(exchange, headers, body)

    async def _prompt(self, exchange: Exchange, headers: dict, body: bytes) -> None:
        count = int(headers.get("x-fairlead-prompt-tokens", 0))
        tokens = tokens_from_bytes(body[: 4 * count]) if count else None
        exchange.request = Received(exchange.request.path, headers, list(tokens) if tokens else None, body[4 * count :])
        self.received.append(exchange.request)
        if tokens:
            hashes = block_hashes(prompt_root(self.format), tokens, self.format.block_tokens)
            exchange.cached = self.format.block_tokens * sum(1 for block in hashes if block in self._cache)
            exchange.hashes = hashes
            exchange.backlog = len(tokens) - exchange.cached
            self.backlog += exchange.backlog
        try:
            await self.behaviour(exchange)
        except (ConnectionError, asyncio.CancelledError):
            self.gone += 1
            raise
        finally:
            exchange.begun()
