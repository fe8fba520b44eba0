"""`fairlead-operator` as a process: flags, health, a clean end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually

COMMAND = [sys.executable, "-m", "fairlead_operator.main"]
ROOT = Path(__file__).parents[3]
SOURCES = os.pathsep.join(str(ROOT / folder) for folder in ("operator", "index", "common"))
FLAGS = [
    "--worker-image=w:1",
    "--router-image=r:1",
    "--redis-url=redis://r:6379",
    "--default-gpus=0",
    "--cluster-domain=cluster.local",
]


def environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": SOURCES, **more}


@pytest.fixture
def process(server: apiserver.ApiServer, namespace: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = tmp_path / "log"
    arguments = [
        *COMMAND,
        *FLAGS,
        "--namespaces=",
        f"--lease-namespace={namespace}",
        f"--kubeconfig={server.kubeconfig}",
        "--health-port=0",
        "--image-pull-policy=Never",
    ]
    with log.open("wb") as out:
        running = subprocess.Popen(arguments, stdout=out, stderr=out, env=environment(FAIRLEAD_DEFAULT_GPUS="4"))
    yield running, log
    running.kill()
    running.wait()


def test_it_runs_says_so_and_ends_cleanly(
    server: apiserver.ApiServer, namespace: str, process: tuple[subprocess.Popen[bytes], Path]
) -> None:
    running, log = process
    port = eventually(lambda: re.search(r"health on port (\d+)", log.read_text()), within=30).group(1)

    def status(path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return int(error.code)

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    eventually(lambda: status("/readyz") == 200)
    assert status("/healthz") == 200
    cluster = Cluster(server, namespace)
    cluster.create()
    container = eventually(lambda: cluster.get("deployments", "qwen-worker"))["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "w:1" and container["imagePullPolicy"] == "Never"
    assert "limits" not in container["resources"], "flags win over the environment"
    mine = f'fairlead_service_workers{{namespace="{namespace}",service="qwen",state="desired"}} 1.0'
    eventually(lambda: mine in metrics())
    assert "fairlead_operator_leading 1.0" in metrics() and 'fairlead_operator_api_requests_total{code="201",method="PATCH"}' in metrics()
    cluster.server.request("DELETE", cluster.path("inferenceservices", "qwen"))
    assert eventually(lambda: cluster.get("inferenceservices", "qwen") is None), "no finalizer holds it"
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=15) == 0, log.read_text()
    assert '"default_gpus":0' in log.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "fairlead-operator: --worker-image is missing; give it, or set FAIRLEAD_WORKER_IMAGE\n"),
        ([*FLAGS, "--default-gpus=-1"], "--default-gpus '-1': Input should be greater than or equal to 0"),
        ([*FLAGS, "--nonsense=1"], "unrecognized arguments: --nonsense=1; fairlead-operator --help lists the flags\n"),
        ([*FLAGS, "--redis-url=redis://:hunter2@r:6379"], "--redis-url 'redis://***@r:6379': contains a password"),
    ],
)
def test_invalid_flags_end_the_process_with_a_reason(flags: list[str], words: str) -> None:
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr and "pydantic" not in done.stderr
    assert "hunter2" not in done.stderr


def test_every_line_of_a_json_log_is_an_object_also_those_of_kopf(tmp_path: Path) -> None:
    """The API server is away, about which every part of the operator complains."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "test", "user": {"token": "t"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    command = [*COMMAND, *FLAGS, "--namespaces=ml", f"--kubeconfig={tmp_path / 'kubeconfig'}", "--health-port=0", "--log-format=json"]
    with (tmp_path / "log").open("wb") as out:
        running = subprocess.Popen(command, stdout=out, stderr=out, env=environment())
    try:
        eventually(lambda: all(name in (tmp_path / "log").read_text() for name in ("kopf.", "reflector", "leader_election")), within=60)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=30) == 0
    finally:
        running.kill()
        running.wait()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert all({"time", "level", "logger", "message", "trace_id"} <= line.keys() for line in lines)
    assert any(line["logger"].startswith("kopf.") and line["level"] == "ERROR" for line in lines)
