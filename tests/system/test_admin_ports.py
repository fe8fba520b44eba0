"""A real worker and a real router with admin ports: the client ports serve no admin path, however it is spelled.

The worker has `--chat-template`, which reaches the router in the prompt format.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.admin_paths import ROUTER, WORKER, status, variants
from tests.worker.api.process import WorkerProcess, until

from fairlead.random_model.build import make_model

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[answer]"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("admin")
    model = make_model(folder / "tiny", "qwen3", vocab=1024, layers=1)
    variables = {"FAIRLEAD_ADMIN_PORT": "0", "FAIRLEAD_ALLOW_RUNTIME_LORA_UPDATING": "true"}
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ("--served-model-name", "tiny", "--chat-template", str(folder / "template.jinja"))
    started = WorkerProcess(model, folder / "worker", *flags, **variables)
    yield started.wait_ready()
    assert started.stop() == 0, "both ports close cleanly"


@pytest.fixture(scope="module")
def router_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("router") / "log"


@pytest.fixture(scope="module")
def router(worker: WorkerProcess, router_log: Path) -> Iterator[tuple[int, int]]:
    """Yield its inference port and its admin port."""
    log = router_log
    flags = [f"--workers=static://127.0.0.1:{worker.port}", f"--worker-admin-port={admin_port(worker.log)}"]
    command = [sys.executable, "-m", "fairlead_router.main", "--host=127.0.0.1", "--port=0", "--admin-port=0", *flags]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            port = int(until(lambda: re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text()), "the router listens")[1])
            until(lambda: httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200, "it polls the worker at its admin port")
            yield port, admin_port(log)
        finally:
            process.terminate()


def admin_port(log: Path) -> int:
    found = until(lambda: re.search(r"admin paths on http://127\.0\.0\.1:(\d+)", log.read_text()), "an admin port")
    return int(found[1])


def test_the_workers_inference_port_serves_only_inference(worker: WorkerProcess) -> None:
    served = [(target, method) for path in WORKER for target in variants(path) for method in ("GET", "POST")]
    reached = {(target, method): code for target, method in served if (code := status(worker.port, target, method)) not in (404, 405)}
    # A name below /v1/models/ is a model's, whatever it looks like, and no such model exists here.
    assert not reached
    paths = worker.client.get("/openapi.json").json()["paths"]
    assert "/v1/completions" in paths and not set(paths) & set(WORKER)
    assert worker.complete(model="tiny", prompt="hello", max_tokens=1)["choices"]
    assert {worker.client.get(path).status_code for path in ("/health", "/ready", "/version", "/v1/models")} == {200}


def test_the_workers_admin_port_serves_admin_paths_and_no_inference(worker: WorkerProcess) -> None:
    port = admin_port(worker.log)
    assert {status(port, path) for path in WORKER[:4]} == {200}
    assert [status(port, path, "POST") for path in WORKER[4:6]] == [400, 400], "a body without an adapter's name"
    assert {status(port, path) for path in WORKER[6:8]} == {200} and status(port, WORKER[8], "POST") == 200
    assert b"writes no trace" in httpx.get(f"http://127.0.0.1:{port}{WORKER[9]}").content
    assert {status(port, path) for path in ("/health", "/livez", "/ping", "/ready", "/version")} == {200}
    assert {status(port, path, "POST") for path in ("/v1/completions", "/tokenize")} == {404} and status(port, "/v1/models") == 404


def test_the_routers_inference_port_reaches_no_admin_path_of_router_or_worker(router: tuple[int, int]) -> None:
    port, _ = router
    served = [(target, method) for path in (*WORKER, *ROUTER) for target in variants(path) for method in ("GET", "POST")]
    reached = {(target, method): code for target, method in served if (code := status(port, target, method)) not in (404, 405)}
    assert not reached
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 1}, timeout=60)
    assert answer.status_code == 200


def test_the_routers_admin_port_serves_admin_paths_and_no_inference(router: tuple[int, int]) -> None:
    _, port = router
    assert {status(port, path) for path in (*ROUTER[:-1], "/health", "/ready", "/version")} == {200}
    assert status(port, ROUTER[-1], "POST") == 200
    assert {status(port, path, "POST") for path in ("/v1/completions", "/tokenize", "/query")} == {404}
    assert status(port, "/v1/models") == 404
    (seen,) = httpx.get(f"http://127.0.0.1:{port}/fairlead/workers").json()["workers"]
    assert seen["usable"] and seen["load"]["pages_total"] > 0


def test_worker_and_router_render_with_the_template_of_the_flag(worker: WorkerProcess, router: tuple[int, int], router_log: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 2, "temperature": 0}
    urls = (f"http://127.0.0.1:{router[0]}", worker.url)
    answers = [httpx.post(f"{url}/v1/chat/completions", json=body | {"return_token_ids": True}, timeout=60).json() for url in urls]
    asked = {"model": "tiny", "tokens": answers[0]["prompt_token_ids"]}
    assert worker.client.post("/detokenize", json=asked).json()["prompt"] == "[user] hello there\n[answer]"
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
    logged = r"/v1/chat/completions 200 .* prompt_tokens=(\d+)"
    found = until(lambda: re.search(logged, router_log.read_text()), "the router logs its own tokens")
    assert int(found[1]) == answers[0]["usage"]["prompt_tokens"]
