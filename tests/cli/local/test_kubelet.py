"""The local kubelet with real processes: restarts, readiness, endpoints, scaling, replacement, and no process left behind."""

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
import redis.exceptions
from tests.cli.processes import find_marked

from fairlead.local.kubelet import Kubelet
from fairlead.local.process import Guard
from fairlead.local.redis import LocalRedis
from fairlead.local.workloads import LocalSettings, Workload

SERVER = textwrap.dedent(
    """
    import http.server, os, subprocess, sys, time
    port = int(sys.argv[len(sys.argv) - sys.argv[::-1].index("--port")])
    if os.environ.get("WITH_CHILD"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started = time.monotonic()
    LOADING = b'{"ready": false, "phase": "Loading weights", "percent": 40, "reason": "slow disk"}'
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            loading = time.monotonic() - started < float(os.environ.get("LOADING", "0"))
            body = LOADING if loading else os.environ["POD"].encode()
            self.send_response(503 if loading else 200)
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *args): pass
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


def workload(name: str = "web", *, replicas: int = 1, code: str = SERVER, env: dict[str, str] | None = None, port: int = 0) -> Workload:
    variables: list[dict[str, Any]] = [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    variables += [{"name": key, "value": value} for key, value in (env or {}).items()]
    container = {
        "name": "worker",
        "command": [sys.executable, "-c", code],
        "env": variables,
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8000}, "periodSeconds": 1},
    }
    return Workload(
        name=name,
        namespace="default",
        service="svc",
        component="worker",
        replicas=replicas,
        template={"spec": {"containers": [container], "terminationGracePeriodSeconds": 5}},
        port=port,
    )


@pytest.fixture
def settings(tmp_path: Path) -> LocalSettings:
    for part in ("endpoints", "logs"):
        (tmp_path / part).mkdir()
    return LocalSettings(redis_url="unix:///nowhere", endpoints=tmp_path / "endpoints", logs=tmp_path / "logs")


@pytest.fixture
async def kubelet(settings: LocalSettings) -> AsyncIterator[Kubelet]:
    with Guard() as guard:
        running = Kubelet(settings, guard=guard, host_env=dict(os.environ))
        try:
            yield running
        finally:
            await running.close(grace=2)


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


def endpoints(settings: LocalSettings) -> list[str]:
    return settings.endpoints_file("svc").read_text().split()


async def test_pods_become_ready_and_are_listed(kubelet: Kubelet, settings: LocalSettings) -> None:
    kubelet.apply([workload(replicas=2)])
    assert endpoints(settings) == []
    await until(kubelet.all_ready)
    assert endpoints(settings) == [pod.address for pod in kubelet.pods()]
    async with httpx.AsyncClient(trust_env=False) as client:
        names = {(await client.get(f"http://{address}/")).text for address in endpoints(settings)}
    assert names == {"web-0", "web-1"}


async def test_a_killed_pod_leaves_the_list_and_returns_with_its_name_and_address(kubelet: Kubelet, settings: LocalSettings) -> None:
    kubelet.apply([workload()])
    await until(kubelet.all_ready)
    pod = kubelet.pods()[0]
    before, address = pod.pid, pod.address
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await until(lambda: endpoints(settings) == [])
    assert pod.state.phase == "CrashLoopBackOff" and pod.state.reason == "killed by SIGKILL"
    await until(kubelet.all_ready)
    assert pod.pid != before and endpoints(settings) == [address] and pod.state.restarts == 1


async def test_progress_is_reported_by_the_worker(kubelet: Kubelet) -> None:
    kubelet.apply([workload(env={"LOADING": "1"})])
    pod = kubelet.pods()[0]
    await until(lambda: pod.state.phase == "Loading weights")
    assert pod.state.percent == 40 and pod.state.reason == "slow disk" and not pod.state.ready
    await until(kubelet.all_ready)


async def test_scaling_starts_and_stops_only_the_difference(kubelet: Kubelet, settings: LocalSettings) -> None:
    kubelet.apply([workload(replicas=1)])
    await until(kubelet.all_ready)
    first = kubelet.pods()[0].pid
    kubelet.apply([workload(replicas=3)])
    await until(kubelet.all_ready)
    assert len(endpoints(settings)) == 3
    kubelet.apply([workload(replicas=1)])
    assert len(endpoints(settings)) == 1, "a pod leaves the list before it gets SIGTERM"
    assert [pod.pid for pod in kubelet.pods()] == [first]


async def test_a_changed_template_replaces_pods_without_a_gap(kubelet: Kubelet, settings: LocalSettings) -> None:
    kubelet.apply([workload()])
    await until(kubelet.all_ready)
    old = endpoints(settings)
    kubelet.apply([workload(env={"NEW": "1"})])
    counts: list[int] = []
    # takes samples while it waits
    await until(lambda: counts.append(len(endpoints(settings))) or kubelet.all_ready())
    assert min(counts) >= 1 and endpoints(settings) != old


async def test_a_fixed_port_is_free_before_its_next_owner_starts(kubelet: Kubelet) -> None:
    from fairlead.local.kubelet import free_port

    port = free_port(set())
    kubelet.apply([workload(port=port)])
    await until(kubelet.all_ready)
    kubelet.apply([workload(port=port, env={"NEW": "1"})])
    await until(kubelet.all_ready)
    assert kubelet.pods()[0].state.restarts == 0


async def test_a_pod_that_cannot_start_reports_why(kubelet: Kubelet) -> None:
    kubelet.apply([workload(code="import sys; sys.exit('no such model: /nowhere')")])
    pod = kubelet.pods()[0]
    await until(lambda: pod.state.restarts >= 1)
    assert pod.state.phase == "CrashLoopBackOff" and pod.state.reason == "exit status 1"
    assert pod.last_output() == ["no such model: /nowhere"]


async def test_stopping_while_starting_leaves_nothing(settings: LocalSettings) -> None:
    with Guard() as guard:
        running = Kubelet(settings, guard=guard, host_env=dict(os.environ))
        running.apply([workload(replicas=2, env={"MARK": str(settings.logs)})])
        await running.close(grace=2)
    assert not find_marked(str(settings.logs))


async def test_children_of_a_dead_container_are_killed(kubelet: Kubelet, settings: LocalSettings) -> None:
    kubelet.apply([workload(env={"WITH_CHILD": "1", "MARK": str(settings.logs)})])
    await until(kubelet.all_ready)
    assert len(find_marked(str(settings.logs))) == 2
    kubelet.apply([replace(workload(), replicas=0)])
    await until(lambda: not find_marked(str(settings.logs)))


DRAINS = SERVER.replace(
    'http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()',
    textwrap.dedent(
        """
        import signal, threading
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        asked = []
        def drain(*_):
            asked.append(1)
            if len(asked) == 1:
                threading.Thread(target=lambda: (server.shutdown(), server.server_close())).start()
        signal.signal(signal.SIGTERM, drain)
        server.serve_forever()
        time.sleep(1.5)  # its streams: longer than the period of the probes
        open(os.environ["TOLD"], "w").write(str(len(asked)))
        """
    ),
)


async def test_a_draining_pod_with_a_closed_port_keeps_its_grace_period(kubelet: Kubelet, tmp_path: Path) -> None:
    draining = workload(code=DRAINS, env={"TOLD": str(tmp_path / "told")})
    draining.template["spec"]["containers"][0]["livenessProbe"] = {"httpGet": {"path": "/health", "port": 8000}, "failureThreshold": 1}
    kubelet.apply([draining])
    await until(kubelet.all_ready)
    await kubelet.close(grace=20)
    assert (tmp_path / "told").read_text() == "1", "one SIGTERM, and no liveness probe ended the drain"


async def test_a_killed_redis_is_restarted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Guard() as guard:
        server = await LocalRedis.start(tmp_path, env=dict(os.environ), guard=guard)
        client = redis.asyncio.Redis.from_url(server.url, decode_responses=True)
        before = (await client.info("server"))["process_id"]
        os.kill(before, signal.SIGKILL)

        async def again() -> int:
            with contextlib.suppress(redis.exceptions.RedisError):
                return int((await client.info("server"))["process_id"])
            return before

        deadline = time.monotonic() + 20
        while (now := await again()) == before:
            assert time.monotonic() < deadline, "no second Redis"
            await asyncio.sleep(0.05)
        await client.aclose()
        await server.stop()
        assert not Path(f"/proc/{now}").exists() and "killed by SIGKILL" in caplog.text
