"""Clients that are slow, numerous, or do not send HTTP are bounded and get a reason, without harm to others. uvicorn on a socket, with the
worker's protocol."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from tests.bare_client import HEAD, PATIENCE_SECONDS, SLOW, UNBOUNDED, UNKNOWN_CODING, UPGRADES, WHOLE, send_headers_forever, send_raw
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from fairlead_worker.api.front.connections import STALL_SECONDS, Connection, Connections
from fairlead_worker.api.server import UvicornServer
from fairlead_worker.config import Limits

LIMITS = {"max_header_bytes": 65536, "max_headers": 128, "header_timeout": 10.0, "body_timeout": 10.0, "max_connections": 100}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the server has no event for its inner state
            await asyncio.sleep(0.01)


def count_requests() -> int:
    """Return the requests of this process, without those that only await garbage collection."""
    gc.collect()
    return sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())


class Served:
    """A server whose application reads the body and returns its length, once it may."""

    def __init__(self, **limits: Any) -> None:
        self.connections = Connections(SimpleNamespace(**LIMITS | limits))
        self.may = asyncio.Event()
        self.may.set()
        self.gone = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the last request, after its body was read."""
        self.piece = b""
        """Bytes to send repeatedly instead."""
        self.size = 0
        """Size of each response in bytes, beside the length of the body."""
        self.started = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            size += len(message["body"])
            if not message["more_body"]:
                break
        self.headers = list(scope["headers"])
        await self.may.wait()
        self.started += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if self.size:
            await send({"type": "http.response.body", "body": b"x" * self.size, "more_body": True})
        while self.piece:
            await send({"type": "http.response.body", "body": self.piece, "more_body": True})
            await asyncio.sleep(0)  # a send to a closed connection does not wait
        await send({"type": "http.response.body", "body": b"%d" % size})

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def _served(**limits: Any) -> AsyncIterator[Served]:
    served = Served(**limits)
    config = uvicorn.Config(served, http=served.connections.protocol, lifespan="off", log_config=None, ws="none", port=0, host="127.0.0.1")  # type: ignore[arg-type]
    server = UvicornServer(config)
    tasks = asyncio.create_task(server.serve()), asyncio.create_task(served.connections.monitor())
    await until(lambda: server.started)
    served.port = server.servers[0].sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    yield served
    server.should_exit = server.force_exit = True
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


HEADS = {
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n",
    "HTTP/0.9": b"GET /health HTTP/0.9\r\nhost: x\r\n\r\n",
    "HTTP/2.0": b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n",
    "two keys": HEAD + b"authorization: a\r\nauthorization: b\r\n\r\n",
}


@pytest.fixture
def serve() -> Callable[..., AbstractAsyncContextManager[Served]]:
    return _served


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        *SLOW,
        (HEAD + b"x: " + b"y" * 70_000, (431, "headers_too_large")),
        (HEAD + b"".join(b"x-%d: y\r\n" % n for n in range(130)) + b"\r\n", (431, "headers_too_large")),
        (b"no HTTP at all\r\n\r\n", (400, "bad_request")),
        (b"GET /\xff\xff HTTP/1.1\r\nhost: x\r\n\r\n", (400, "bad_request")),
        *((sent, (400, "bad_request")) for sent in HEADS.values()),
        (UNKNOWN_CODING, (400, "bad_request")),
        (WHOLE.replace(b" HTTP", b"#a HTTP"), (400, "bad_request")),
        *((sent, (431, "headers_too_large")) for sent in UNBOUNDED.values()),
        *((sent, (400, "bad_request")) for sent in UPGRADES.values()),
    ],
    ids=["nothing", "headers", "body", "chunk", "bytes", "number", "garbage", "path", *HEADS, "coding", "fragment", *UNBOUNDED, *UPGRADES],
)
async def test_a_client_that_makes_no_progress_gets_a_reason_and_is_disconnected(
    serve: Any, sent: bytes, expected: tuple[int, str]
) -> None:
    async with serve(header_timeout=0.2, body_timeout=0.2) as served:
        assert await send_raw(served.port, sent) == expected
        assert (await send_raw(served.port, WHOLE.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost"))) == (200, "1\r\n2\r\n0\r\n\r\n")
        await until(lambda: not len(served.connections.limiter))


@pytest.mark.parametrize(
    ("sent", "setting"), [(HEAD + b"x-slow: ", "header_timeout"), (HEAD + b"content-length: 9\r\n\r\n{", "body_timeout")]
)
async def test_a_timeout_names_the_setting_that_allows_more_time(serve: Any, sent: bytes, setting: str) -> None:
    assert setting in Limits.model_fields
    async with serve(header_timeout=0.2, body_timeout=0.2) as served:
        reader, writer = await served.open()
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
        writer.close()
    assert f"(--limits {setting})" in answer.decode()


async def test_trailers_are_no_headers(serve: Any) -> None:
    """Otherwise a trailer could set a header that only a router may send."""
    async with serve() as served:
        head = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        assert (await send_raw(served.port, head + b"2\r\n{}\r\n0\r\n" + b"x-fairlead-priority: 0\r\n" * 100 + b"\r\n"))[0] == 200
        assert [name for name, _ in served.headers] == [b"host", b"connection", b"transfer-encoding"]


async def test_sending_a_byte_now_and_then_does_not_extend_the_timeout(serve: Any) -> None:
    async with serve(header_timeout=0.5) as served:
        assert b" 408 " in await send_headers_forever(served.port)


async def test_a_client_that_leaves_in_its_body_is_no_request(serve: Any) -> None:
    async with serve(body_timeout=0.2) as served:
        assert (await send_raw(served.port, HEAD + b"content-length: 9\r\n\r\n{"))[0] == 408
        assert served.gone == 1, "the application heard of it"


async def test_a_refusal_does_not_stand_for_the_answer_before_it(serve: Any) -> None:
    """The parser refuses the second request when its head is read, while the first is not answered."""
    async with serve() as served:
        served.may.clear()
        reader, writer = await served.open()
        writer.write(WHOLE + HEAD + b"transfer-encoding: chunked\t\r\n\r\n0\r\n\r\n")
        await until(lambda: served.headers)
        served.may.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            said = await reader.read()
        assert said.startswith(b"HTTP/1.1 200") and said.count(b"HTTP/1.1") == 1
        writer.close()


async def test_pipelined_requests_are_answered_in_order_and_are_not_late(serve: Any) -> None:
    """This holds even if the first takes longer than the body timeout: nothing of the others is read meanwhile."""
    async with serve(header_timeout=0.1, body_timeout=0.1) as served:
        served.may.clear()
        reader, writer = await served.open()
        writer.write(WHOLE * 2 + HEAD + b"content-length: 4\r\n\r\n{")
        await asyncio.sleep(0)
        await until(lambda: any(one.pipeline for one in served.connections.limiter))
        for connection in served.connections.limiter:
            served.connections.limiter.close_overdue(connection.loop.time() + 1e6)  # as if this much time had passed
        served.may.set()
        writer.write(b"   ")
        answers = await asyncio.wait_for(reader.readuntil(b"4\r\n0\r\n\r\n"), PATIENCE_SECONDS)
        assert answers.count(b"HTTP/1.1 200") == 3
        writer.close()


async def test_at_most_one_pipelined_request_is_read_ahead(serve: Any) -> None:
    """A client that pipelines requests behind a slow one must not fill the memory with them."""
    before = count_requests()  # of other tests
    async with serve() as served:
        served.may.clear()
        reader, writer = await served.open()
        writer.write(WHOLE * 20_000)
        await until(lambda: any(one.pipeline for one in served.connections.limiter))
        for _ in range(100):
            assert (await send_raw(served.port, b"no HTTP\r\n\r\n"))[0] == 400
        assert count_requests() - before <= 3
        served.may.set()
        for _ in range(1000):
            assert await asyncio.wait_for(reader.readuntil(b"2\r\n0\r\n\r\n"), PATIENCE_SECONDS)
        writer.close()


async def test_a_pipelined_request_starts_when_the_previous_answer_is_taken(serve: Any) -> None:
    """A client that sends requests and never reads holds the bytes of one response, not of all."""
    async with serve() as served:
        served.size, count = 60_000, 200
        reader, writer = await served.open()
        writer.transport.pause_reading()
        writer.write(WHOLE * count)
        limiter = served.connections.limiter
        await until(lambda: any(one._stalled_since is not None for one in limiter))
        for _ in range(100):
            assert (await send_raw(served.port, b"no HTTP\r\n\r\n"))[0] == 400
        started = served.started
        (connection,) = (one for one in limiter if one._stalled_since is not None)
        assert started < count and connection.transport.get_write_buffer_size() < 2 * served.size
        writer.transport.resume_reading()
        for _ in range(count):
            await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), PATIENCE_SECONDS)
        writer.close()


async def test_a_closed_connection_leaves_nothing_for_the_garbage_collector(serve: Any) -> None:
    """Full garbage collections block the event loop in proportion to the number of objects, so they are rare."""
    async with serve() as served:
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await send_raw(served.port, WHOLE.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost"))
            await until(lambda: not len(served.connections.limiter))
            await asyncio.sleep(0)
            assert sum(isinstance(one, Connection) for one in gc.get_objects()) <= 1
        finally:
            gc.enable()


async def test_connections_are_limited_and_probes_still_get_through(serve: Any) -> None:
    async with serve(max_connections=3) as served:
        idle = [await served.open() for _ in range(2)]
        for reader, writer in idle:
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"0\r\n\r\n")
        busy = [await served.open() for _ in range(3)]
        for _, writer in busy:
            writer.write(HEAD)
        assert await asyncio.wait_for(idle[0][0].read(), PATIENCE_SECONDS) == b"", "the longest idle one gave way"
        limiter = served.connections.limiter
        await until(lambda: len(limiter) == 3 and all(one._framing.overhead for one in limiter))
        assert await send_raw(served.port, WHOLE) == (503, "too_many_connections")
        assert (await send_raw(served.port, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))[0] == 200
        for _, writer in (*idle, *busy):
            writer.close()


async def test_a_client_that_reads_nothing_stops_its_answer_and_is_disconnected_in_the_end(serve: Any) -> None:
    """The application waits too, so no more than the transport's buffer is held."""
    async with serve() as served:
        served.piece = b"x" * 65536
        reader, writer = await served.open()
        writer.write(WHOLE)
        await reader.readline()
        limiter = served.connections.limiter
        await until(lambda: any(one._stalled_since is not None for one in limiter))
        (connection,) = limiter
        assert connection.transport.get_write_buffer_size() < 4 * 65536
        connection.check_stall(connection._stalled_since + STALL_SECONDS + 1)
        await until(lambda: not len(limiter))
        served.piece = b""
        writer.close()
