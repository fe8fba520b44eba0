"""`fairlead console` with real routers; `kubectl` is a script that forwards a port as kubectl does, and the API server is a stub."""

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cli.processes import wait_until_gone
from tests.operator.support.manifests import pod
from tests.operator.support.stub_server import StubServer
from tests.router.harness import Fleet
from tests.router.tenancy.test_access import key_file

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.kube.forward import choose_router
from fairlead.local.rundir import RunRecord
from fairlead.tools.live import router_row
from fairlead.tools.runs import NothingRuns
from fairlead.tools.status import show
from fairlead.tools.web_console import check_console, find_local
from fairlead_router.console.fleet import describe_fleet

KUBECTL = """#!{python}
import asyncio, json, os, sys
async def relay(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
async def connect(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", int(os.environ["ROUTER_PORT"]))
    await asyncio.gather(relay(reader, there[1]), relay(there[0], writer))
async def main():
    if "REFUSAL" in os.environ:
        sys.exit(os.environ["REFUSAL"])
    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    json.dump([os.getpid(), *sys.argv[1:]], open(os.environ["CALL"], "w"))
    print(f"Forwarding from 127.0.0.1:{{server.sockets[0].getsockname()[1]}} -> 8082", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
READY = [{"type": "Ready", "status": "True"}]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack, tmp_path)


def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
    """Answer as an API server with one service and its router pod."""
    service = {"metadata": {"name": "qwen", "namespace": "team"}, "spec": {}}
    if "/pods?" in path:
        return 200, {"items": [router_pod("qwen-router-b"), router_pod("qwen-router-a")], "metadata": {}}
    if path.partition("?")[0].endswith("/inferenceservices"):
        return 200, {"items": [service], "metadata": {}}
    return (200, service) if path.endswith("/inferenceservices/qwen") else (404, {"message": "not found"})


def router_pod(name: str, **status: Any) -> dict[str, Any]:
    made: dict[str, Any] = pod(name, **{"conditions": READY, **status})
    made["metadata"].setdefault("labels", {})["app.kubernetes.io/component"] = "router"
    return made


@asynccontextmanager
async def console(folder: Path, port: int, *words: str, **variables: str) -> AsyncIterator[Process]:
    """Run `fairlead console` on a stub cluster. The forwarded port is `port` of this machine."""
    (folder / "bin").mkdir()
    (folder / "bin" / "kubectl").write_text(KUBECTL.format(python=sys.executable))
    (folder / "bin" / "kubectl").chmod(0o755)
    with StubServer(answer) as server:
        context = {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "team"}}
        config = {"current-context": "here", "contexts": [context], "users": [{"name": "me", "user": {}}]}
        (folder / "kubeconfig").write_text(json.dumps(config | {"clusters": [{"name": "here", "cluster": {"server": server.url}}]}))
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        places = {"PATH": path, "CALL": str(folder / "call"), "MARK": str(folder), "TMPDIR": str(folder), "ROUTER_PORT": str(port)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fairlead", "console", "--kubeconfig", str(folder / "kubeconfig"), *words),
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, **places, **variables},
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    await asyncio.to_thread(wait_until_gone, str(folder))


async def forwarded(process: Process) -> str:
    assert process.stdout is not None and process.stderr is not None
    line = (await process.stdout.readline()).decode().strip()
    assert line.endswith("/ui"), await process.stderr.read()
    return line


async def test_a_port_is_forwarded_to_a_router_pod_until_ctrl_c(fleet: Fleet, tmp_path: Path) -> None:
    router = await fleet.router(await fleet.worker(), console=True)
    async with console(tmp_path, router.port) as process:
        page = await forwarded(process)
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(page)).text
            links = set(re.findall(r'(?:href|src)="(/[^"]+)"', text))
            assert {"/ui/requests", "/ui/console.js", "/ui/console.css"} <= links
            for link in links:
                assert (await client.get(str(httpx.URL(page).join(link)))).status_code == 200
        _, *call = json.loads((tmp_path / "call").read_text())
        assert call[2:] == ["--namespace", "team", "port-forward", "--address", "127.0.0.1", "pod/qwen-router-a", ":8082"]
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


async def test_the_end_of_the_forwarding_is_reported(fleet: Fleet, tmp_path: Path) -> None:
    router = await fleet.router(await fleet.worker(), console=True)
    async with console(tmp_path, router.port, "qwen") as process:
        await forwarded(process)
        os.kill(json.loads((tmp_path / "call").read_text())[0], signal.SIGKILL)
        _, errors = await process.communicate()
        assert process.returncode == 2 and b"kubectl port-forward ended" in errors


async def test_a_refusal_of_kubectl_and_an_unknown_service_are_one_line(tmp_path: Path) -> None:
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
    async with console(tmp_path / "a", 1, "qwen", REFUSAL="pods is forbidden: cannot create pods/portforward") as process:
        _, errors = await process.communicate()
    assert process.returncode == 2 and errors.count(b"\n") == 1 and b"cannot create pods/portforward" in errors
    async with console(tmp_path / "b", 1, "other") as process:
        _, errors = await process.communicate()
    assert process.returncode == 2 and b"no InferenceService other in namespace team; there are: qwen" in errors


async def test_a_router_without_a_console_says_what_to_set(fleet: Fleet, tmp_path: Path) -> None:
    router = await fleet.router(await fleet.worker())
    async with console(tmp_path, router.port, "qwen") as process:
        _, errors = await process.communicate()
    assert process.returncode == 2 and b'has no web console: set spec.routing.args: ["--console"]' in errors


async def test_a_console_that_asks_for_a_key_is_found(fleet: Fleet, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(key_file())
    router = await fleet.router(await fleet.worker(), console=True, api_keys_file=str(keys))
    await asyncio.to_thread(check_console, f"http://127.0.0.1:{router.port}", "")


def test_a_server_that_does_not_answer_or_is_no_router_is_refused() -> None:
    with pytest.raises(UserError, match="Check that a Fairlead router runs there"):
        check_console("http://127.0.0.1:1", "")
    with StubServer(lambda *_: (200, {})) as server, pytest.raises(UserError, match="not a Fairlead router's answer"):
        check_console(server.url, "")


async def test_a_pod_has_the_same_name_and_state_as_in_the_cli(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    router = (await fleet.router(await fleet.worker(), console=True)).server.router
    [worker] = router.table
    steps: list[tuple[str, Any, str, str]] = [
        ("pod", "p", "p", "Ready"),
        ("silent", True, "p", "NotReady"),
        ("pod", "", worker.address, "NotReady"),
    ]
    for field, value, name, state in steps:
        setattr(worker, field, value)
        page = json.loads(await router.describe_workers())
        [row], [pod] = describe_fleet(router.table)["pods"], router_row("", page).pods
        show(make_console(), "http://router", page)
        assert row[:2] == [pod.name, pod.state] == [name, state]
        assert [name, state] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]


def test_one_local_service_is_chosen_or_named() -> None:
    two = RunRecord(1, "fairlead up -f two.yaml", {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"})
    assert find_local([two], "b") == "http://127.0.0.1:2"
    with pytest.raises(UserError, match="give the SERVICE, one of a, b"):
        find_local([two], "")
    with pytest.raises(UserError, match="--replicas 2"):
        find_local([RunRecord(1, "fairlead serve ./m", {"serve": "http://127.0.0.1:1"}, has_router=False)], "")
    with pytest.raises(NothingRuns):
        find_local([], "")


def test_only_a_ready_router_is_chosen() -> None:
    waits = router_pod("a", conditions=[])
    assert choose_router([waits, router_pod("c"), router_pod("b"), pod("d", conditions=READY)], "qwen") == "b"
    with pytest.raises(UserError, match=r"no router is ready\. `fairlead explain qwen` says why"):
        choose_router([waits], "qwen")
