"""The life of an endpoint picker: health, drain, certificates, signals and flags."""

import asyncio
import re
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.router.gateway import Balancer, Gateway, gateway
from tests.router.harness import Fleet, eventually
from tests.router.interop.picker import PATH, picking, prompt, refuses
from tests.router.test_process import refused, router_process, until_ready

from fairlead_router.interop.picker import server as picker_server
from fairlead_router.interop.picker.certificates import generate_certificate
from fairlead_router.interop.picker.health import Health


async def test_health_is_the_routers_readiness(fleet: Fleet) -> None:
    worker = await fleet.worker(ready=False)
    router = await fleet.router(worker, ready=0, picker_port=0, picker_tls="off")
    assert router.server.router.picker is not None
    async with gateway(router.server.router.picker.port) as asking:
        health = HealthStub(asking.channel)

        async def status(service: str) -> int:
            return (await health.Check(HealthCheckRequest(service=service))).status

        ready = "envoy.service.ext_proc.v3.ExternalProcessor"
        assert await status("liveness") == HealthCheckResponse.SERVING
        assert [await status(name) for name in ("", "readiness", ready)] == [HealthCheckResponse.NOT_SERVING] * 3
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await status("other")
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        watch = health.Watch(HealthCheckRequest(service=ready))
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        worker.ready = True
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        router.server.router.drain()
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_watching_an_unknown_service_yields_its_status_once() -> None:
    checks = 0

    class Unchanged:
        async def wait_for_change(self, timeout: float) -> None:
            nonlocal checks
            checks += 1
            if checks == 10:
                raise asyncio.CancelledError

    watch = Health(Unchanged()).Watch(HealthCheckRequest(service="other"), None)  # type: ignore[arg-type]
    seen = []
    with pytest.raises(asyncio.CancelledError):
        async for response in watch:
            seen.append(response.status)
    assert seen == [HealthCheckResponse.SERVICE_UNKNOWN]


async def test_a_draining_router_picks_until_its_grace_period_is_over(fleet: Fleet) -> None:
    worker = await fleet.worker()
    async with picking(fleet, worker, drain_timeout=20) as (router, asking):
        router.server.router.drain()
        exchange = asking.exchange()
        await exchange.request(PATH, prompt())
        assert (await exchange.picked())[0] == [worker.address]


async def test_a_drain_refuses_new_streams_and_lets_the_others_finish(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker_server, "QUIET", 0.0)
    async with picking(fleet, await fleet.worker(), drain_timeout=20) as (router, asking):
        exchange = asking.exchange()
        await exchange.request(PATH, prompt())
        await exchange.picked()
        await exchange.streamed()
        router.server.router.stop_accepting()
        await exchange.respond()

        await eventually(lambda: refuses(asking), "new streams are refused")
        assert await asking.exchange().call.code() == grpc.StatusCode.UNAVAILABLE
        await exchange.response_body(b"", end=True)
        await exchange.call.done_writing()
        assert await exchange.call.code() == grpc.StatusCode.OK


async def test_no_stream_fails_while_proxies_move_to_another_router(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies send streams on connections that last, and learn late of a GOAWAY: the network takes 50 ms from a picker to them."""
    monkeypatch.setattr(picker_server, "CONNECTION_AGE", 1.0)
    monkeypatch.setattr(picker_server, "QUIET", 1.6)
    worker = await fleet.worker()
    routers = [await fleet.router(worker, picker_port=0, picker_tls="off", drain_timeout=30) for _ in range(2)]
    pickers = [router.server.router.picker for router in routers]
    assert pickers[0] is not None and pickers[1] is not None
    picked = [0, 0]
    async with Balancer([pickers[0].port]) as balancer, AsyncExitStack() as stack:
        # As in Envoy, no stream is sent again.
        proxies = [await stack.enter_async_context(gateway(balancer.port, options=[("grpc.enable_retries", 0)])) for _ in range(4)]

        async def ask(proxy: Gateway, number: int, phase: int) -> None:
            exchange = proxy.exchange()
            await exchange.request(PATH, prompt(f"request {number}"))
            await exchange.picked()
            await exchange.streamed()
            await exchange.respond(end=True)
            await exchange.call.done_writing()
            assert await exchange.call.code() == grpc.StatusCode.OK
            picked[phase] += 1

        async def load(proxy: Gateway) -> None:
            number = 0
            while pickers[0]._stopping is None or not pickers[0]._stopping.done() or number < 20:
                await ask(proxy, number, int(balancer.ports == [pickers[1].port]))
                number += 1

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            tasks = [group.create_task(load(proxy)) for proxy in proxies for _ in range(4)]
            await eventually(lambda: picked[0] >= 20, "the first router picks")
            routers[0].server.router.drain()
            balancer.ports = [pickers[1].port]  # as Kubernetes does once a router is not ready
            routers[0].server.router.stop_accepting()
            await pickers[0].close()
        assert len(tasks) == 16 and picked[1] >= 20


async def test_tls_certificates_in_a_folder_are_reloaded_after_renewal(fleet: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    folder.mkdir()

    def write() -> bytes:
        key, certificate = generate_certificate()
        (folder / "tls.key").write_bytes(key)
        (folder / "tls.crt").write_bytes(certificate)
        return certificate

    first = write()
    router = await fleet.router(await fleet.worker(), picker_port=0, picker_tls=str(folder))
    assert router.server.router.picker is not None

    async def status(trusted: bytes) -> int:
        async with gateway(router.server.router.picker.port, grpc.ssl_channel_credentials(trusted)) as asking:
            return (await HealthStub(asking.channel).Check(HealthCheckRequest(service="liveness"), timeout=5)).status

    assert await status(first) == HealthCheckResponse.SERVING
    second = write()
    assert await status(second) == HealthCheckResponse.SERVING
    (folder / "tls.crt").write_bytes(b"half of")
    assert await status(second) == HealthCheckResponse.SERVING


async def test_a_second_signal_ends_a_picker_that_drains(fleet: Fleet) -> None:
    worker = await fleet.worker()
    flags = ("--workers", f"static://{worker.address}", "--picker-port", "0", "--picker-tls", "off", "--drain-grace", "0.1")
    async with router_process(*flags, "--poll-interval", "0.1", "--drain-timeout", "600") as (process, url, lines):
        port = next(int(found[1]) for line in lines if (found := re.search(r"endpoint picker on \S+:(\d+)", line)))
        async with gateway(port) as asking, httpx.AsyncClient(base_url=url) as client:
            await until_ready(client, 200)
            exchange = asking.exchange()
            await exchange.request(PATH, prompt())
            assert (await exchange.picked())[0] == [worker.address]
            process.terminate()
            await until_ready(client, 503)
            process.terminate()
            await asyncio.wait_for(process.wait(), 20)


@pytest.mark.parametrize("flags", [("--picker-tls", "/nowhere"), ("--picker-port", "x")])
def test_invalid_flags_are_named(flags: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refused(monkeypatch, "--workers", "static://127.0.0.1:9", "--port", "0", "--picker-port", "0", *flags)
    assert f"{flags[0]} '{flags[1]}'" in capsys.readouterr().err


def test_the_compiled_protobuf_messages_match_their_source(tmp_path: Path) -> None:
    root = Path(__file__).parents[3] / "router"
    source = "fairlead_router/interop/picker/ext_proc.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", source]
    subprocess.run(command, check=True)
    for name in ("ext_proc_pb2.py", "ext_proc_pb2.pyi"):
        compiled = tmp_path / Path(source).parent / name
        assert compiled.read_text() == (root / Path(source).parent / name).read_text(), "run `make protos`"
