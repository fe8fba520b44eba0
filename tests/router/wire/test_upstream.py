"""Workers' responses, valid and malformed, and how the router handles them."""

import asyncio
import gc
import logging
from collections import Counter
from pathlib import Path

import httpx
import pytest
from tests.router.harness import Fleet, eventually, post
from tests.router.stand_in_worker import Exchange, answers

from fairlead_common.http.client_connection import ClientConnection, Request
from fairlead_common.http.response import Reply
from fairlead_router.wire import connection_pool as pool
from fairlead_router.wire.upstream import MAX_HEAD_BYTES, Connection, UpstreamError


async def test_an_answer_without_a_length_ends_with_its_connection(fleet: Fleet) -> None:
    async def unframed(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + b'{"a":')
        await exchange.writer.drain()
        exchange.writer.write(b"1}")
        exchange.writer.close()

    router = await fleet.router(await fleet.worker(behaviour=unframed))
    for _ in range(2):
        assert (await router.complete("x")).json() == {"a": 1}


async def test_a_worker_that_is_lost_between_a_whole_answers_head_and_body_costs_no_answer(fleet: Fleet) -> None:
    async def head_only(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 93\r\n\r\n")
        await exchange.writer.drain()
        exchange.writer.close()

    lost = await fleet.worker(behaviour=head_only)
    router = await fleet.router(lost, await fleet.worker(), policy="RoundRobin")
    answers_ = [await router.complete("x") for _ in range(4)]
    assert lost.received and all(answer.status_code == 200 and answer.json()["choices"] for answer in answers_)


async def test_an_endless_fetched_body_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken or hostile worker must not be able to fill the router's memory through its health checks."""
    monkeypatch.setattr(pool, "MAX_FETCH_BYTES", 1 << 20)
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(bytes(65536))
                await writer.drain()
        except ConnectionError:
            ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connections = pool.ConnectionPool(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(UpstreamError, match="/load: the answer exceeds 1 MiB"):
            await connections.fetch("/load", 20.0)
        await asyncio.wait_for(ended.wait(), 10)
        connections.close()


async def test_interim_responses_are_skipped(fleet: Fleet) -> None:
    async def early(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\n")
        await answers(exchange)

    router = await fleet.router(await fleet.worker(behaviour=early))
    for _ in range(2):
        answer = await router.complete("x")
        assert answer.status_code == 200 and "link" not in answer.headers and answer.json()["choices"]


async def test_a_request_is_retried_on_a_new_connection_if_the_worker_closes_a_kept_one(fleet: Fleet) -> None:
    """Its idle timeout and our request cross: the worker did nothing, and no other worker needs to be tried."""
    served: Counter[asyncio.StreamWriter] = Counter()

    async def once_each(exchange: Exchange) -> None:
        served[exchange.writer] += 1
        if served[exchange.writer] > 1:
            exchange.writer.close()
            return
        await answers(exchange)

    worker = await fleet.worker(behaviour=once_each)
    router = await fleet.router(worker, poll_interval=30)
    assert [(await router.complete("x")).status_code for _ in range(10)] == [200] * 10
    assert len(worker.received) > 10, "some were refused their connection"
    assert await router.metric("fairlead_router_retries_total") == 0


async def test_long_headers_pass_and_endless_headers_are_a_failure_of_the_worker(fleet: Fleet) -> None:
    async def long_headers(exchange: Exchange) -> None:
        await exchange.whole(200, {}, x_long="a" * (MAX_HEAD_BYTES // 2))

    async def endless(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 200 OK\r\nx-long: ")
        while True:
            exchange.writer.write(b"a" * 65536)
            await exchange.writer.drain()

    bad, good = await fleet.worker(behaviour=endless), await fleet.worker(behaviour=long_headers)
    router = await fleet.router(bad, good, policy="RoundRobin", poll_interval=30)
    codes = [answer.status_code for answer in [await router.complete(f"p{number}") for number in range(4)]]
    assert codes == [200] * 4 and len(good.received) == 4
    assert len({request.json["prompt"] for request in bad.received}) == len(bad.received) > 0, "no request was sent there twice"


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_a_worker_lost_within_a_chunk(fleet: Fleet, kind: str) -> None:
    async def dies_in_a_chunk(exchange: Exchange) -> None:
        await exchange.head(kind=kind)
        exchange.writer.write(b"40\r\ndata: half an ev")
        await exchange.writer.drain()
        exchange.writer.close()

    router = await fleet.router(await fleet.worker(behaviour=dies_in_a_chunk))
    if kind == "application/json":
        with pytest.raises(httpx.RemoteProtocolError):
            await router.complete("x")
        return
    text = (await router.complete("x", stream=True)).text
    assert text.startswith("data: half an ev\n\ndata: ") and '"stream_cut"' in text and text.endswith("\n\n")


async def test_a_second_answer_to_one_request_is_discarded(fleet: Fleet) -> None:
    async def twice(exchange: Exchange) -> None:
        answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nx-turn: %d\r\n\r\n{}"
        exchange.writer.write(answer % 1 + answer % 2)

    worker = await fleet.worker(behaviour=twice)
    router = await fleet.router(worker)
    for _ in range(3):
        answer = await router.complete("x")
        assert answer.headers["x-turn"] == "1" and answer.content == b"{}"


async def test_surplus_connections_to_a_worker_are_closed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, gate = 0, asyncio.Event()

    async def all_at_once(exchange: Exchange) -> None:
        nonlocal arrived
        arrived += 1
        await gate.wait()
        await answers(exchange)

    worker = await fleet.worker(behaviour=all_at_once)
    router = await fleet.router(worker)
    asked = [asyncio.create_task(router.complete("x")) for _ in range(20)]
    await eventually(lambda: arrived == 20, "twenty requests at once")
    gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert len(worker._connections) >= 20, "kept for the next requests"
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.0)
    await eventually(lambda: len(worker._connections) <= 2, "a health check closed the old ones")


@pytest.mark.usefixtures("frozen_heap")
async def test_three_hundred_streams_leave_nothing_behind(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third ends, a third is cut by its client, a third by its worker. Afterwards no task, socket, object or count is left."""

    async def streams(exchange: Exchange) -> None:
        kind = exchange.request.headers["x-kind"]
        await exchange.head()
        await exchange.event("one")
        if kind == "client":
            await exchange.until_client_gone()
        elif kind == "worker":
            exchange.die()
        else:
            await exchange.end()

    # pytest keeps log records, and they keep the frames of errors
    monkeypatch.setattr(logging.getLogger("fairlead_router.serving.proxy"), "disabled", True)
    worker = await fleet.worker(behaviour=streams)
    router = await fleet.router(worker)
    (known,) = router.table
    server = router.server

    async def one(number: int) -> None:
        kind = ("whole", "client", "worker")[number % 3]
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post({"prompt": "x", "stream": True}, "1.1", f"x-kind: {kind}"))
        await reader.readuntil(b"\n\n")
        if kind != "client":
            assert (b"[DONE]" if kind == "whole" else b"stream_cut") in await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()

    def left() -> dict[str, int]:
        gc.collect()
        kinds = Counter(type(thing) for thing in gc.get_objects())
        objects = {kind.__name__: kinds[kind] for kind in (Request, Reply, ClientConnection, Connection)}
        return objects | {"tasks": len(asyncio.all_tasks()), "files": len(list(Path("/proc/self/fd").iterdir()))}

    await router.client.get("/health")
    before = left()
    await asyncio.gather(*(one(number) for number in range(300)))
    await eventually(lambda: known.in_flight == 0 and len(server._connections) == before["ClientConnection"], "all have ended")
    assert known.pending_tokens == 0
    known.pool.close()

    def same() -> bool:
        now = left()
        return all(now[kind] <= before[kind] + 2 for kind in now)  # the health checks have one connection with two ends

    await eventually(same, "nothing is left", 10)
