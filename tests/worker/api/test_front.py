"""API keys and CORS of a worker that clients reach without a router."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.admin_paths import WORKER
from tests.servers.redis_server import RedisServer
from tests.worker.api.process import WorkerProcess

ORIGIN = "https://chat.example.com"
BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(model: Path, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, Path]]:
    """A worker with two keys, and their file. The last test of it changes the keys and ends it."""
    folder = tmp_path_factory.mktemp("keyed")
    (keys := folder / "keys").write_text("# of this test\nfirst-key\nsecond-key\n")
    flags = ("--api-key-file", str(keys), "--allowed-origins", ORIGIN, "--log-format", "json")
    worker = WorkerProcess(model, folder / "run", *flags, FAIRLEAD_REDIS_URL=redis.url, FAIRLEAD_INDEX_NAMESPACE="test/keyed")
    yield worker.wait_ready(), keys
    worker.kill()


def test_keys_of_a_worker_cannot_reach_each_others_responses(keyed: tuple[WorkerProcess, Path]) -> None:
    """Nor with the header in which a router names its tenants: no router is in front of a worker with keys."""
    worker, _ = keyed
    one, two = bearer("first-key"), bearer("second-key")
    ask: dict[str, Any] = {"input": "one two", "max_output_tokens": 6, "temperature": 0, "store": True}
    made = worker.client.post("/v1/responses", json=ask, headers=one).json()
    url = f"/v1/responses/{made['id']}"
    digest = sha256(b"first-key").hexdigest()
    for headers in (two, two | {"x-fairlead-tenant": f"key {digest}"}):
        assert worker.client.get(url, headers=headers).status_code == 404
    assert worker.client.get(url, headers=one | {"x-fairlead-tenant": "other"}).json() == made


def test_keys_and_origins(keyed: tuple[WorkerProcess, Path]) -> None:
    worker, keys = keyed
    for path in ("/health", "/livez", "/ready", "/openapi.json"):
        assert worker.client.get(path).status_code == 200, f"{path} needs no key"
    for path in ("/v1/models", "/internal/prompt-format", "/metrics", "/load"):
        assert worker.client.get(path).status_code == 401
        assert worker.client.get(path, headers=bearer("first-key")).status_code == 200
    for headers in ({}, bearer("third-key"), {"authorization": "Basic first-key"}):
        refused = worker.client.post("/v1/completions", json=BODY, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    anthropic = worker.client.post("/v1/messages", json={}, headers={"x-api-key": "wrong"})
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (401, "authentication_error")
    for headers in (bearer("first-key"), {"x-api-key": "second-key"}):
        assert worker.client.post("/v1/completions", json=BODY, headers=headers).status_code == 200

    keys.write_text("third-key\n")
    assert worker.client.post("/v1/completions", json=BODY, headers=bearer("third-key")).status_code == 200
    assert worker.client.post("/v1/completions", json=BODY, headers=bearer("first-key")).status_code == 401
    keys.write_text("\n")
    assert worker.client.post("/v1/completions", json=BODY, headers=bearer("third-key")).status_code == 200, "the last usable keys"

    asks = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = worker.client.options("/v1/completions", headers=asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert worker.client.options("/v1/completions", headers=asks | {"origin": "https://evil.example"}).status_code == 400
    read = worker.client.post("/v1/completions", json=BODY, headers={"origin": ORIGIN})
    assert (read.status_code, read.headers["access-control-allow-origin"]) == (401, ORIGIN), "the page can read the error"
    assert worker.stop() == 0
    assert all(json.loads(line)["time"] for line in worker.log.read_text().splitlines())


def test_without_the_flags_there_are_no_keys_and_no_origins(shared: WorkerProcess) -> None:
    answer = shared.client.get("/v1/models", headers={"origin": ORIGIN})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_admin_paths_refuse_web_pages_even_of_allowed_origins(flagged: WorkerProcess) -> None:
    worker, form = flagged, {"origin": ORIGIN, "content-type": "text/plain"}
    assert worker.client.get("/v1/models", headers={"origin": ORIGIN}).headers["access-control-allow-origin"] == "*"
    for path in WORKER:
        for answer in (
            *(
                worker.client.request(method, path, headers=form | {"origin": origin})
                for method in ("GET", "POST")
                for origin in (ORIGIN, "null")
            ),
            worker.client.options(path, headers={"origin": ORIGIN, "access-control-request-method": "POST"}),
        ):
            assert answer.status_code == 403, (path, answer.request.method)
            assert answer.json()["error"]["code"] == "forbidden_origin"
            assert not [name for name in answer.headers if name.startswith("access-control-")]
    same = worker.client.post("/reset_prefix_cache", headers={"origin": worker.url})
    assert same.status_code == worker.client.post("/reset_prefix_cache").status_code == 200, "programs and pages of the worker itself may"


def test_a_form_of_another_page_cannot_change_state_without_cors_either(shared: WorkerProcess) -> None:
    form = {"origin": "https://evil.example", "content-type": "application/x-www-form-urlencoded"}
    assert shared.client.post("/reset_prefix_cache", headers=form).status_code == 403
