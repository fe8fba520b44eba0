"""An ASGI application behind the server: bodies, answers, disconnects and backpressure. The server itself: tests/router/wire."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from tests.bare_client import HEAD, PATIENCE_SECONDS, SLOW, UNBOUNDED, UPGRADES, WHOLE, send_headers_forever, send_raw

from fairlead_common.http.asgi import AsgiServer
from fairlead_common.http.client_connection import STALL_SECONDS, ClientConnection
from fairlead_common.http.connection_limiter import ConnectionLimiter
from fairlead_common.http.unread_answers import UNREAD_SECONDS, abort_unread

LIMITS = {"header_timeout": 10.0, "body_timeout": 10.0, "max_connections": 100}
CLOSE = WHOLE.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost")


class Served:
    """An application that reads the body and returns its length, once it may."""

    def __init__(self, **limits: Any) -> None:
        self.limiter = ConnectionLimiter(SimpleNamespace(**LIMITS | limits), "--limits {}".format)
        self.connections: set[ClientConnection] = set()
        self.may = asyncio.Event()
        self.may.set()
        self.gone = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the last request, after its body was read."""
        self.piece = b""
        """Bytes to send repeatedly instead."""
        self.started = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
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
        while self.piece:
            await send({"type": "http.response.body", "body": self.piece, "more_body": True})
            await asyncio.sleep(0)  # a send to a closed connection does not wait
        await send({"type": "http.response.body", "body": b"%d" % size})
        assert (await receive())["type"] == "http.disconnect", "the answer is complete"


@asynccontextmanager
async def serve(**limits: Any) -> AsyncIterator[Served]:
    served, loop = Served(**limits), asyncio.get_running_loop()
    create_connection = partial(ClientConnection, AsgiServer(served), served.connections, loop, served.limiter)
    server = await loop.create_server(create_connection, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def check() -> None:
        while True:
            await asyncio.sleep(0.05)
            served.limiter.close_overdue(monotonic())

    checking = asyncio.create_task(check())
    yield served
    checking.cancel()
    server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the server has no event for its inner state
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        *SLOW,
        (HEAD + b"x: " + b"y" * 70_000, (431, "headers_too_large")),
        (b"GET /\xff\xff HTTP/1.1\r\nhost: x\r\n\r\n", (400, "bad_request")),
        *((sent, (431, "headers_too_large")) for sent in UNBOUNDED.values()),
        *((sent, (400, "bad_request")) for sent in UPGRADES.values()),
    ],
    ids=["nothing", "headers", "body", "chunk", "bytes", "path", *UNBOUNDED, *UPGRADES],
)
async def test_a_client_that_makes_no_progress_gets_a_reason_and_is_disconnected(sent: bytes, expected: tuple[int, str]) -> None:
    async with serve(header_timeout=0.2, body_timeout=0.2) as served:
        assert await send_raw(served.port, sent) == expected
        assert await send_raw(served.port, CLOSE) == (200, "1\r\n2\r\n0\r\n\r\n")
        await until(lambda: not len(served.limiter))


@pytest.mark.parametrize(
    ("sent", "setting"), [(HEAD + b"x-slow: ", "header_timeout"), (HEAD + b"content-length: 9\r\n\r\n{", "body_timeout")]
)
async def test_a_timeout_names_the_setting_that_allows_more_time(sent: bytes, setting: str) -> None:
    async with serve(header_timeout=0.2, body_timeout=0.2) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await reader.read()
        writer.close()
    assert f"(--limits {setting})" in answer.decode()


async def test_trailers_are_no_headers() -> None:
    """Otherwise a trailer could set a header that only a router may send."""
    async with serve() as served:
        head = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        assert (await send_raw(served.port, head + b"2\r\n{}\r\n0\r\n" + b"x-fairlead-priority: 0\r\n" * 100 + b"\r\n"))[0] == 200
        assert [name for name, _ in served.headers] == [b"host", b"connection", b"transfer-encoding"]


@pytest.mark.parametrize("kind", ["headers", "body"])
async def test_sending_a_byte_now_and_then_does_not_extend_the_timeout(kind: str) -> None:
    async with serve(header_timeout=0.5, body_timeout=0.5) as served:
        if kind == "headers":
            assert b" 408 " in await send_headers_forever(served.port)
            return
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(HEAD + b"content-length: 10000\r\n\r\n")
        answer = asyncio.create_task(reader.readline())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not answer.done():
                writer.write(b"x")
                await asyncio.sleep(0.05)
        assert b" 408 " in answer.result()
        writer.close()


async def test_a_client_that_leaves_in_its_body_is_no_request() -> None:
    async with serve(body_timeout=0.2) as served:
        assert (await send_raw(served.port, HEAD + b"content-length: 9\r\n\r\n{"))[0] == 408
        await until(lambda: served.gone == 1)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serve(header_timeout=0.1, body_timeout=0.1) as served:
        served.may.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(WHOLE * 2 + HEAD + b"content-length: 4\r\n\r\n{")
        await until(lambda: bool(served.headers))
        await asyncio.sleep(0.3)  # longer than the timeouts: nothing of the others is read meanwhile
        served.may.set()
        writer.write(b"   ")
        async with asyncio.timeout(PATIENCE_SECONDS):
            answers = await reader.readuntil(b"4\r\n0\r\n\r\n")
        assert answers.count(b"HTTP/1.1 200") == 3
        writer.close()


async def test_whole_answers_that_clients_do_not_read_are_bounded_together() -> None:
    """A tenant's slow clients would fill a worker's memory. The largest goes first, and none within the time that a large answer takes."""
    async with serve() as served:
        writers, connections = [], []
        for mebibytes in (16, 32, 16):
            served.piece = b"x" * (mebibytes << 20)
            _, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
            writer.write(WHOLE)
            writers.append(writer)
            known = frozenset(connections)
            await until(lambda known=known: any(one.unread(0.0)[0] for one in served.connections - known))
            connections += served.connections - set(connections)
        held = sum(one.unread(0.0)[0] for one in connections)
        now = monotonic()
        abort_unread(served.connections, now, held - 1)
        abort_unread(served.connections, now + UNREAD_SECONDS + 5, held)
        await asyncio.sleep(0)
        assert served.connections == set(connections), "their time, or the bytes, suffice"
        abort_unread(served.connections, now + UNREAD_SECONDS + 5, held - (8 << 20))
        await until(lambda: served.connections == {connections[0], connections[2]})
        served.piece = b""
        abort_unread(served.connections, now + UNREAD_SECONDS + 5, 0)
        await until(lambda: not served.connections)
        for writer in writers:
            writer.close()


async def test_a_client_that_reads_nothing_stops_its_answer_and_is_disconnected_in_the_end() -> None:
    """The application waits too, so no more than the transport's buffer is held."""
    async with serve() as served:
        served.piece = b"x" * 65536
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(WHOLE)
        await reader.readline()
        await until(lambda: any(one._write_paused_at is not None for one in served.connections))
        (connection,) = served.connections
        assert connection._transport.get_write_buffer_size() < 4 * 65536
        connection.close_if_stalled(monotonic() + STALL_SECONDS + 1)
        await until(lambda: not len(served.limiter))
        served.piece = b""
        writer.close()
