"""A real worker, a real index: two tenants with the same prompt never see each other's cached tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.router.harness import RunningRouter, eventually, running_router
from tests.router.tenancy.test_access import ANNA, BORIS, bearer, key_file
from tests.servers.redis_server import RedisServer
from tests.worker.api.process import WorkerProcess

from fairlead.random_model.build import make_model

NAMESPACE = "test/apart"
TALK = "It was told to anna alone, in confidence, and at some length, so that it fills more than one block of the index. " * 4


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def worker(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    model = make_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3", vocab=1024, layers=1)
    variables = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": NAMESPACE, "FAIRLEAD_POD_NAME": "pod-0"}
    started = WorkerProcess(model, tmp_path_factory.mktemp("worker"), **variables)
    try:
        yield started.wait_ready()
    finally:
        started.stop()


async def cached(router: RunningRouter, key: str, **fields: Any) -> tuple[int, int]:
    """Return cached tokens as reported by the worker and as predicted by the index."""
    body = {"prompt": TALK, "max_tokens": 1, **fields}
    answer = await router.client.post("/v1/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    said = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return said, int(answer.headers["x-fairlead-predicted-tokens"])


async def test_no_tenant_sees_what_another_has_cached(worker: WorkerProcess, redis: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file())
    settings = {
        "workers": f"static://127.0.0.1:{worker.port}",
        "redis_url": redis.url,
        "index_namespace": NAMESPACE,
        "api_keys_file": str(path),
    }
    async with running_router(**settings) as router:
        await router.usable(1)
        assert await cached(router, ANNA) == (0, 0)

        async def is_predicted() -> bool:
            said, predicted = await cached(router, ANNA)
            assert said > 0 or predicted == 0
            return predicted > 0 and said > 0

        await eventually(is_predicted, "anna's own prompt is cached and predicted")
        assert await cached(router, BORIS, user="anna", cache_salt="tenant:anna") == (0, 0)
        firsts = [await cached(router, BORIS, cache_salt=f"probe {n}") for n in range(4)]
        assert firsts == [(0, 0)] * 4, "none of anna's blocks under any salt of boris'"

        async def own() -> bool:
            return (await cached(router, BORIS, cache_salt="probe 0"))[0] > 0

        await eventually(own, "his own he sees")
        assert (await cached(router, ANNA))[0] > 0
