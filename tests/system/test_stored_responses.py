"""Routers and workers as processes with one Redis: a conversation goes on at any worker and router, and tenants find nothing of others."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.servers.redis_server import RedisServer, free_port
from tests.system.processes import until
from tests.worker.api.process import WorkerProcess

from fairlead.random_model.build import make_model

SECRET = "a secret from which routers derive keys"
NAMESPACE = "system/stored"
ANNA, BORIS = "fl-anna-key-which-is-random-in-life", "fl-boris-key-which-is-random-in-life"
TALK = "It was told to anna alone, in confidence, and at some length, so that it fills more than one block of the index. " * 4
Start = Callable[..., httpx.Client]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Start, list[WorkerProcess]]]:
    """Start two workers; yield a function that starts a router (with `keys`: for tenants), and the workers."""
    folder = tmp_path_factory.mktemp("stored")
    (folder / "secret").write_text(SECRET)
    tenants = {name: {"keys": [{"sha256": sha256(key.encode()).hexdigest()}]} for name, key in (("anna", ANNA), ("boris", BORIS))}
    (folder / "keys.yaml").write_text(json.dumps({"saltSecret": SECRET, "tenants": tenants}))
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        model = make_model(folder / "tiny", "qwen3", vocab=1024, layers=1)
        workers = []
        for pod in ("one", "other"):
            variables = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": NAMESPACE, "FAIRLEAD_POD_NAME": pod}
            workers.append(WorkerProcess(model, folder / pod, "--served-model-name", "tiny", **variables))
            stack.callback(workers[-1].kill)

        def start(*flags: str, keys: bool = False, has_index: bool = False) -> httpx.Client:
            port = free_port()
            index = ("--policy", "PrefixAware", "--redis-url", redis.url, "--index-namespace", NAMESPACE) if has_index else ()
            command = [sys.executable, "-m", "fairlead_router.main", "--host", "127.0.0.1", "--port", str(port), "--policy", "RoundRobin"]
            command += ["--workers", "static://" + ",".join(f"127.0.0.1:{worker.port}" for worker in workers), *flags, *index]
            command += ["--api-keys-file", str(folder / "keys.yaml")] if keys else []
            with (folder / f"router-{port}.log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
            until(lambda: _usable(client, ANNA if keys else "") == 2, "the router sees both workers")
            return client

        for worker in workers:
            worker.wait_ready()
        yield start, workers


def _usable(client: httpx.Client, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        return sum(worker["usable"] for worker in client.get("/fairlead/workers", headers=headers).json()["workers"])
    except httpx.TransportError:
        return 0


def create(client: httpx.Client, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"input": "one two", "max_output_tokens": 3, "temperature": 0, "store": True, **fields}
    return client.post("/v1/responses", json=body, headers=headers)


def test_a_conversation_goes_on_at_any_worker_and_router(cluster: tuple[Start, list[WorkerProcess]], tmp_path: Path) -> None:
    """A router that redirects requests proxies those with stored responses."""
    start, _ = cluster
    (tmp_path / "secret").write_text(SECRET)
    flags = ("--responses-secret-file", str(tmp_path / "secret"))
    first, second = start(*flags), start(*flags)
    conversation, pods = create(first).json(), set()
    for router in (first, second) * 3:
        answer = create(router, previous_response_id=conversation["id"])
        pods.add(answer.headers["x-fairlead-pod"])
        assert answer.json()["previous_response_id"] == conversation["id"] and answer.json()["store"] is True
        conversation = answer.json()
    assert pods == {"one", "other"}
    items = second.get(f"/v1/responses/{conversation['id']}/input_items").json()["data"]
    assert len(items) == 13, "seven inputs and six outputs"
    assert {second.get(f"/v1/responses/{conversation['id']}").status_code for _ in range(4)} == {200}
    without = start("--forwarding-mode", "redirect")
    assert without.post("/v1/responses", json={"input": "one", "max_output_tokens": 2}).status_code == 307, "nothing is stored"
    assert without.get(f"/v1/responses/{conversation['id']}").status_code == 404, "its secret is its own"
    own = create(without).json()
    assert [create(without, previous_response_id=own["id"], store=stored).status_code for stored in (True, True, None)] == [200] * 3
    (tmp_path / "secret").write_text("another secret: a rotation")
    assert second.get(f"/v1/responses/{conversation['id']}").status_code == 404
    assert create(second, previous_response_id=create(first).json()["id"]).status_code == 200


def test_tenants_and_workers_clients_find_nothing_of_each_other(cluster: tuple[Start, list[WorkerProcess]], tmp_path: Path) -> None:
    start, workers = cluster
    (tmp_path / "secret").write_text(SECRET)
    router = start("--responses-secret-file", str(tmp_path / "secret"), keys=True)
    id = create(router, ANNA).json()["id"]
    refused = create(router, BORIS, previous_response_id=id)
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = router.request(method, f"/v1/responses/{id}{path}", headers={"authorization": f"Bearer {BORIS}"})
        assert answer.status_code == 404, (method, path)
        for worker in workers:  # past the router, in the name of its tenant
            direct = worker.client.request(method, f"/v1/responses/{id}{path}", headers={"x-fairlead-tenant": "anna"})
            assert direct.status_code == 404, (method, path)
    headers = {"authorization": f"Bearer {ANNA}"}
    assert create(router, ANNA, previous_response_id=id).status_code == 200
    assert router.delete(f"/v1/responses/{id}", headers=headers).json()["deleted"] is True
    assert router.get(f"/v1/responses/{id}", headers=headers).status_code == 404


def test_no_tenant_sees_what_another_has_cached(cluster: tuple[Start, list[WorkerProcess]]) -> None:
    start, _ = cluster
    router = start(keys=True, has_index=True)

    def cached(key: str, **fields: Any) -> tuple[int, int]:
        """Return cached tokens as reported by the worker and as predicted by the index."""
        body = {"prompt": TALK, "max_tokens": 1, **fields}
        answer = router.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        said = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return said, int(answer.headers["x-fairlead-predicted-tokens"])

    def is_predicted() -> bool:
        said, predicted = cached(ANNA)
        assert said > 0 or predicted == 0
        return predicted > 0 and said > 0

    assert cached(ANNA) == (0, 0)
    until(is_predicted, "anna's own prompt is cached and predicted")
    assert cached(BORIS, user="anna", cache_salt="tenant:anna") == (0, 0)
    firsts = [cached(BORIS, cache_salt=f"probe {n}") for n in range(4)]
    assert firsts == [(0, 0)] * 4, "none of anna's blocks under any salt of boris'"
    until(lambda: cached(BORIS, cache_salt="probe 0")[0] > 0, "his own he sees")
    assert cached(ANNA)[0] > 0
