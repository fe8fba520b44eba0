"""Limits on the size of requests, and on how slowly clients may send them."""

import asyncio
import importlib.metadata
from pathlib import Path
from time import monotonic

import pytest
from tests.bare_client import HEAD, PATIENCE_SECONDS, SLOW, UNBOUNDED, send_raw
from tests.router.harness import Fleet, eventually
from tests.router.stand_in_worker import Exchange
from tests.router.tenancy.test_access import ANNA, BORIS, ask, bearer, guarded


async def test_headers_are_limited_in_number_and_bytes(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    assert await send_raw(router.port, HEAD + b"".join(b"x-%d: y\r\n" % n for n in range(128)) + b"\r\n") == (431, "headers_too_large")
    assert await send_raw(router.port, HEAD + b"x: " + b"y" * 70_000) == (431, "headers_too_large")
    assert (await router.complete("x")).status_code == 200


async def test_a_body_that_is_no_json_gets_the_workers_status(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    for path in ("/v1/chat/completions", "/v1/messages"):
        for body, code in ((b"", None), (b"{", None), (b'{"x": NaN}', None), (b'{"x": ' + b"[" * 100_000, "request_too_large")):
            refused = await router.client.post(path, content=body)
            wanted = code or "invalid_json"
            assert refused.status_code == 400 and refused.json()["error"].get("code", wanted) == wanted


async def test_an_unrepresentable_number_is_named(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    for number in (b"9" * 5000, b"1e999"):
        refused = await router.client.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": ' + number + b"}")
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "max_tokens" and "out of range" in error["message"]


async def test_the_router_reports_its_version_as_a_worker_does(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    assert (await router.client.get("/version")).json() == {"version": importlib.metadata.version("fairlead")}
    assert (await router.client.post("/version")).status_code == 405


@pytest.mark.parametrize(("sent", "expected"), SLOW, ids=["nothing", "headers", "body", "chunk"])
async def test_a_client_that_sends_its_request_too_slowly_is_dropped(fleet: Fleet, sent: bytes, expected: tuple[int, str]) -> None:
    router = await fleet.router(await fleet.worker(), header_timeout=0.2, body_timeout=0.2)
    assert await send_raw(router.port, sent) == expected
    assert router.server.router.handler.body_budget.total == 0


@pytest.mark.parametrize("sent", UNBOUNDED.values(), ids=UNBOUNDED)
async def test_trailers_and_chunk_extensions_count_as_headers(fleet: Fleet, sent: bytes) -> None:
    """The parser joins a trailer's pieces in quadratic time, so one connection could block the event loop until the body timeout."""
    router = await fleet.router(await fleet.worker())
    assert await send_raw(router.port, sent) == (431, "headers_too_large")
    assert router.server.router.handler.body_budget.total == 0


async def test_a_long_answer_does_not_count_as_a_slow_request(fleet: Fleet) -> None:
    """Also not when another request follows on the same connection, half sent."""
    gate = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await gate.wait()
        await exchange.whole(200, {"choices": []})

    router = await fleet.router(await fleet.worker(behaviour=waits), header_timeout=0.1, body_timeout=0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(HEAD + b'content-length: 15\r\n\r\n{"prompt": "x"}' + HEAD)
    await eventually(lambda: any(one.pending_prompts for one in router.table), "it is asked")
    router.server._limiter.close_overdue(monotonic() + 100)  # as if that much time had passed
    gate.set()
    assert b" 200 " in await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
    writer.close()


async def test_connections_are_limited_and_probes_still_get_through(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(), max_connections=4)
    await router.client.aclose()
    opened = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(4)]
    for _, writer in opened:
        writer.write(HEAD)  # they run, so none is idle
    guard = router.server._limiter
    await eventually(lambda: len(guard) == 4 and not guard._idle, "four connections")
    request = HEAD + b"content-length: 15\r\nconnection: close\r\n\r\n" + b'{"prompt": "x"}'
    assert await send_raw(router.port, request) == (503, "too_many_connections")
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert b" 200 " in await reader.readline()
    writer.close()
    for _, writer in opened:
        writer.close()


async def test_an_idle_connection_is_closed_for_a_new_one(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(), max_connections=2)
    await router.client.aclose()
    idle = []
    for _ in range(2):
        idle.append(await asyncio.open_connection("127.0.0.1", router.port))
        idle[-1][1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await idle[-1][0].readuntil(b"}")
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(HEAD + b"content-length: 15\r\nconnection: close\r\n\r\n" + b'{"prompt": "x"}')
    assert b" 200 " in await reader.readline(), "the third is served"
    assert await asyncio.wait_for(idle[0][0].read(), PATIENCE_SECONDS) == b"", "the longest idle one was closed"
    for one in (writer, idle[0][1], idle[1][1]):
        one.close()


async def test_kept_request_bodies_are_limited_fairly_between_tenants(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path, max_inflight_bytes=10_000)
    streams = []
    for key in (ANNA, BORIS):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = HEAD + b"authorization: Bearer " + key.encode() + b"\r\ncontent-length: 8000\r\n\r\n"
        writer.write(head + b"x" * 4900)
        streams.append((reader, writer))
        await eventually(lambda: router.server.router.handler.body_budget.total == 4900 * len(streams), "it is kept")  # over immediately
    refused = await ask(router, ANNA, "x" * 300)
    assert refused.status_code == 503 and refused.headers["retry-after"], "no more for any tenant"
    streams[1][1].close()
    await eventually(lambda: router.server.router.handler.body_budget.total == 4900, "what went is not kept")
    refused = await ask(router, ANNA, "x" * 150)
    assert refused.status_code == 429 and refused.headers["retry-after"], "one tenant has its half"
    assert (await router.client.post("/v1/completions", json={"prompt": "x" * 3000}, headers=bearer(BORIS))).status_code == 200
    streams[0][1].close()
    await eventually(lambda: router.server.router.handler.body_budget.total == 0, "nothing is kept")
