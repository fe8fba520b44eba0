"""HTTP/1.x between a client and the router: accepted requests, pipelining, refusals and timeouts."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import pytest
from tests.bare_client import UPGRADES
from tests.router.harness import Fleet, RunningRouter, eventually, post
from tests.router.stand_in_worker import Exchange, answers

from fairlead_common.http.client_connection import KEEP_ALIVE_SECONDS, STALL_SECONDS, ClientConnection, Request

WHOLE, STREAM = {"prompt": "x"}, {"prompt": "x", "stream": True}


@asynccontextmanager
async def wire(router: RunningRouter) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers, and a body of known length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:])
    return int(head[0].split(" ")[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def test_an_http_1_0_client_gets_an_unframed_stream_that_ends_with_its_connection(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    async with wire(router) as (reader, writer):
        writer.write(post(STREAM, "1.0"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")


async def test_an_http_1_0_client_may_keep_its_connection_for_answers_with_a_length(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    async with wire(router) as (reader, writer):
        for _ in range(2):
            writer.write(post(WHOLE, "1.0", "connection: keep-alive"))
            status, headers, _ = await answer(reader)
            assert status == 200 and headers["connection"] == "keep-alive"
        writer.write(post(WHOLE, "1.0"))
        status, headers, _ = await answer(reader)
        assert status == 200 and headers["connection"] == "close" and not await reader.read()


async def test_pipelined_requests_are_answered_in_order(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    async with wire(router) as (reader, writer):
        writer.write(b"".join(post({"prompt": f"p{number}"}, "1.1", f"x-request-id: {number}") for number in range(20)))
        seen = [(await answer(reader))[1]["x-request-id"] for _ in range(20)]
        assert seen == [str(number) for number in range(20)]
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
        assert [(await answer(reader))[0] for _ in range(3)] == [200] * 3


@pytest.mark.usefixtures("frozen_heap")
async def test_at_most_one_pipelined_request_is_read_ahead(fleet: Fleet) -> None:
    """A client that sends requests behind a slow one must not fill the memory with them."""

    def parsed() -> int:
        return sum(isinstance(one, Request) for one in gc.get_objects())

    router = await fleet.router(await fleet.worker())
    before = parsed()  # requests of other tests
    async with wire(router) as (reader, writer):
        writer.write(b"GET /fairlead/demand?wait=60 HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000)
        await eventually(lambda: any(connection._next for connection in router.server._connections), "one was read ahead")
        for _ in range(20):
            assert (await router.client.get("/health")).status_code == 200
        assert parsed() - before <= 4
        assert (await router.complete("x")).status_code == 200  # the answer to /fairlead/demand
        for _ in range(1001):
            assert (await answer(reader))[0] == 200


async def test_a_pipelined_request_starts_when_the_previous_answer_is_taken(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that never reads holds the bytes of one answer, not of all that it requested."""
    router = await fleet.router(await fleet.worker())
    size, count, built = 50_000, 400, 0

    async def picture() -> bytes:
        nonlocal built
        built += 1
        return b"x" * size

    monkeypatch.setattr(router.server.router, "describe_workers", picture)
    async with wire(router) as (reader, writer):
        writer.transport.pause_reading()
        writer.write(b"GET /fairlead/workers HTTP/1.1\r\nhost: x\r\n\r\n" * count)
        connections = router.server._connections
        await eventually(lambda: any(connection._write_paused_at for connection in connections), "the client is behind")
        for _ in range(20):
            assert (await router.client.get("/health")).status_code == 200
        stalled = [connection for connection in connections if connection._write_paused_at]
        assert len(stalled) == 1 and stalled[0]._transport.get_write_buffer_size() < 2 * size
        assert built < count
        writer.transport.resume_reading()
        for _ in range(count):
            assert (await answer(reader))[0] == 200


@pytest.mark.usefixtures("frozen_heap")
async def test_a_closed_connection_leaves_nothing_for_the_garbage_collector(fleet: Fleet) -> None:
    """Full collections block the event loop for as long as there are objects, so they are rare."""
    router = await fleet.router(await fleet.worker())
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            async with wire(router) as (reader, writer):
                writer.write(post(WHOLE))
                assert (await answer(reader))[0] == 200
        await eventually(lambda: not router.server._connections, "all are closed")
        await asyncio.sleep(0)
        assert sum(isinstance(one, ClientConnection) for one in gc.get_objects()) <= 1
    finally:
        gc.enable()


async def test_expect_100_continue_is_answered_with_100(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    head, _, body = post(WHOLE, "1.1", "expect: 100-continue").partition(b"\r\n\r\n")
    async with wire(router) as (reader, writer):
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await answer(reader))[0] == 200


async def test_expect_100_continue_that_is_refused_gets_no_100(fleet: Fleet) -> None:
    """The client would take an interim answer after the final one for the answer to its next request."""
    router = await fleet.router(await fleet.worker())
    async with wire(router) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 900000000\r\n\r\n")
        assert (await answer(reader))[0] == 413
        writer.write_eof()
        assert not await reader.read()


async def test_chunked_bodies_with_trailers_and_absolute_targets_are_accepted(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    async with wire(router) as (reader, writer):
        writer.write(b"POST http://x:1/v1/completions?a=%20b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b'8\r\n{"prompt\r\n6\r\n":"x"}\r\n0\r\nx-trailer: 1\r\n\r\n')
        assert (await answer(reader))[0] == 200
        writer.write(b"GET /%68ealth HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await answer(reader))[0] == 200
    assert worker.received[0].json == {"prompt": "x"} and worker.received[0].path == "/v1/completions"


async def test_head_has_no_body(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    async with wire(router) as (reader, writer):
        writer.write(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"content-length: 15" in await reader.readuntil(b"\r\n\r\n")
        assert (await answer(reader))[2] == b'{"status":"ok"}'


async def test_an_unsupported_upgrade_is_ignored(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    async with wire(router) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
        assert (await answer(reader))[0] == 200
        assert not await reader.read()


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
GARBAGE = {
    "not HTTP": b"hello\r\n\r\n",
    "length and chunks": HEAD + b"content-length: 3\r\n" + CHUNKED + b"0\r\n\r\n",
    "chunks and length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 3\r\ncontent-length: 5\r\n\r\nabc",
    "a list of lengths": HEAD + b"content-length: 3, 3\r\n\r\nabc",
    "a negative length": HEAD + b"content-length: -1\r\n\r\n",
    "a signed length": HEAD + b"content-length: +3\r\n\r\nabc",
    "a space before the colon": HEAD + b"content-length : 3\r\n\r\nabc",
    "another first coding": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "another last coding": HEAD + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "two codings": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "nearly chunked": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + CHUNKED + b"0\r\n\r\n",
    "a folded header": HEAD + b"x-a: b\r\n transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\nabc",
    "a bare line feed": HEAD + b"x-a: b\ncontent-length: 3\r\n\r\nabc",
    "a bare return": HEAD + b"x-a: b\rcontent-length: 3\r\n\r\nabc",
    "a control character": HEAD + b"bad header: \x00\r\n\r\n",
    "a fragment": HEAD.replace(b" HTTP", b"#a HTTP") + b"content-length: 0\r\n\r\n",
    "a zero byte in a value": HEAD + b"x-a: b\x00\r\n\r\n",
    "no host": HEAD.replace(b"host: x\r\n", b"") + b"content-length: 0\r\n\r\n",
    "two hosts": HEAD + b"Host: y\r\ncontent-length: 0\r\n\r\n",
    "a host with a path": HEAD.replace(b"host: x", b"host: x/y") + b"content-length: 0\r\n\r\n",
    "two keys": HEAD + b"authorization: Bearer a\r\nAuthorization: Bearer b\r\ncontent-length: 0\r\n\r\n",
    "two encodings": HEAD + b"content-encoding: gzip\r\ncontent-encoding: identity\r\ncontent-length: 0\r\n\r\n",
    "HTTP/0.9": HEAD.replace(b"1.1", b"0.9") + b"content-length: 0\r\n\r\n",
    "no version": b"GET /v1/models\r\n\r\n",
    "HTTP/2.0": HEAD.replace(b"1.1", b"2.0") + b"content-length: 0\r\n\r\n",
    **UPGRADES,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_a_request_that_is_not_http_is_refused_and_closed(fleet: Fleet, garbage: bytes) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    async with wire(router) as (reader, writer):
        writer.write(garbage)
        status, headers, body = await answer(reader)
        assert status == 400 and headers["connection"] == "close" and json.loads(body)["error"]["code"] == "bad_request"
        assert not await reader.read()
    assert not worker.received


async def test_garbage_after_a_request_does_not_replace_its_answer(fleet: Fleet) -> None:
    gate = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await gate.wait()
        await answers(exchange)

    worker = await fleet.worker(behaviour=waits)
    router = await fleet.router(worker)
    async with wire(router) as (reader, writer):
        writer.write(post(WHOLE))
        await eventually(lambda: bool(worker.received), "it is at the worker")
        writer.write(GARBAGE["two lengths"] + post(WHOLE))
        (connection,) = router.server._connections
        await eventually(lambda: connection._closing, "the garbage was parsed")
        gate.set()
        assert (await answer(reader))[0] == 200, "the first request's own answer"
        assert not await reader.read(), "and then the end"
    assert len(worker.received) == 1


async def test_a_too_long_head_is_refused_however_it_is_split(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    for tail in (b"", b"\r\n\r\n" + post(WHOLE)):
        async with wire(router) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 70_000 + tail)
            assert (await answer(reader))[0] == 431
            assert not await reader.read()
    assert not worker.received, "bytes after a refusal are not parsed"


async def test_a_half_closed_connection_counts_as_a_disconnect(fleet: Fleet) -> None:
    """nginx does the same: a killed client looks identical, and its tokens cost GPU time."""

    async def never_begins(exchange: Exchange) -> None:
        await exchange.until_client_gone()
        raise ConnectionResetError

    worker = await fleet.worker(behaviour=never_begins)
    router = await fleet.router(worker)
    async with wire(router) as (reader, writer):
        writer.write(post(STREAM))
        await eventually(lambda: bool(worker.received), "the request arrived")
        writer.write_eof()
        assert not await reader.read()
    await eventually(lambda: worker.gone == 1, "the worker saw its client go")


async def test_idle_clients_are_dropped_and_waiting_ones_are_not(fleet: Fleet) -> None:
    gate = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await gate.wait()
        await exchange.whole(200, {})

    worker = await fleet.worker(behaviour=waits)
    router = await fleet.router(worker)
    connections = router.server._connections
    async with wire(router) as (idle, _), wire(router) as (half, sending), wire(router) as (waiting, asking):
        sending.write(post(WHOLE)[:-3])
        asking.write(post(WHOLE))
        await eventually(lambda: bool(worker.received) and len(connections) >= 3, "all three are there")
        for connection in list(connections):
            connection.close_if_stalled(monotonic() + KEEP_ALIVE_SECONDS + 1)
        assert not await idle.read() and not await half.read()
        gate.set()
        assert (await answer(waiting))[0] == 200


async def test_a_client_that_reads_nothing_is_dropped(fleet: Fleet) -> None:
    async def pours(exchange: Exchange) -> None:
        await exchange.head()
        while True:
            await exchange.chunk(b"x" * 65536)

    worker = await fleet.worker(behaviour=pours)
    router = await fleet.router(worker)
    async with wire(router) as (_, writer):
        writer.transport.pause_reading()
        writer.write(post(STREAM))
        connections = router.server._connections
        await eventually(lambda: any(connection._write_paused_at for connection in connections), "the client is behind")
        for connection in list(connections):
            connection.close_if_stalled(monotonic() + STALL_SECONDS + 1)
        await eventually(lambda: worker.gone == 1, "the worker was told")


async def test_the_body_of_a_get_is_not_kept(fleet: Fleet) -> None:
    """No handler reads this body, and the answer takes long: without a limit the body would fill memory."""
    router = await fleet.router(await fleet.worker())
    async with wire(router) as (reader, writer):
        writer.write(b"GET /fairlead/demand?wait=60 HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n" + b"x" * 9_000_000)
        await writer.drain()
        (connection,) = router.server._connections
        assert connection._serving is not None and not connection._serving.body
        writer.write(b"x" * 1_000_000)
        await writer.drain()
        assert (await router.complete("x")).status_code == 200
        assert (await answer(reader))[0] == 200


async def test_requests_without_an_answer_get_503_when_the_drain_ends(fleet: Fleet) -> None:
    async def never_begins(exchange: Exchange) -> None:
        await exchange.until_client_gone()

    worker = await fleet.worker(behaviour=never_begins)
    router = await fleet.router(worker)
    async with wire(router) as (reader, writer):
        writer.write(post(WHOLE))
        await eventually(lambda: bool(worker.received), "the request arrived")
        router.server.leave()
        status, headers, _ = await answer(reader)
        assert status == 503 and headers["retry-after"] and headers["connection"] == "close"


async def test_an_exception_in_a_page_is_a_500(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await fleet.router(await fleet.worker())

    async def fails() -> bytes:
        raise KeyError("surprise")

    monkeypatch.setattr(router.server.router.metrics, "render", fails)
    async with wire(router) as (reader, writer):
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert [(await answer(reader))[0] for _ in range(2)] == [500, 200]
