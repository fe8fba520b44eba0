"""No GET of any process changes state, because every web page can send one. All routes are listed from the code.

A new GET route fails the first test. Read its handler: if it changes state, give it POST. Else add it to READS.
"""

from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.agent.conftest import pair
from tests.router.batch.test_app import serving
from tests.router.harness import Fleet
from tests.servers.redis_server import free_port

from fairlead_agent.proxy.app import ADMIN, Api
from fairlead_router import paths
from fairlead_router.batch.storage.folder import Folder
from fairlead_router.console.console import _STATIC
from fairlead_router.serving.batch_forwarding import ROOTS
from fairlead_worker.api.routes.apis import select_apis

SAFE = {"GET", "HEAD"}
READS = {
    "router": {
        *("/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/.*", "/openapi.json", "/docs"),
        *("/fairlead/workers", "/fairlead/split", "/fairlead/probe", "/fairlead/demand"),
        *("/v1/responses/resp_[0-9a-z_]{1,64}", "/v1/responses/resp_[0-9a-z_]{1,64}/input_items"),
    },
    "console": {"/ui", "/ui/state.json", "/ui/requests", "/ui/prefixes", "/ui/console.css", "/ui/console.js", "/ui/icon.svg"},
    "agent": {"/health", "/ping", "/livez", "/ready", "/load", "/metrics", "/internal/prompt-format", "/engine/health"},
    "batch server": {
        *("/health", "/ready", "/metrics", "/v1/files", "/v1/files/{id}", "/v1/files/{id}/content", "/v1/batches", "/v1/batches/{id}"),
    },
    "worker": {
        *("/health", "/livez", "/ping", "/ready", "/version", "/v1/models", "/v1/models/{name:path}", "/metrics", "/load"),
        *("/v1/responses/{id}", "/v1/responses/{id}/input_items", "/server_info", "/tokenizer_info", "/internal/schedule"),
        *("/internal/prompt-format", "/internal/hot-prefixes/{tokens}"),
    },
}
FOREIGN = ("https://evil.example", "null")


async def test_no_get_changes_state(fleet: Fleet, tmp_path: Path) -> None:
    router = await fleet.router(await fleet.worker(), console=True)
    app = router.server._app
    assert app._console is not None and set(app._pages) <= set(paths.METHODS)
    found = {
        "router": {path for path, methods in (paths.METHODS | paths.PATTERNS).items() if SAFE & set(methods)},
        "console": {*app._console._pages, *_STATIC},
        "worker": {each.path for part in ("all", "admin") for api in select_apis(part).values() for each in api if each.method in SAFE},
    }
    async with pair(tmp_path / "agent") as (_, agent):
        api: Api = agent.server._api
        own = {path for part in ("all", "inference", "admin") for path in api.handlers(part)}
        found["agent"] = {path for path in own if (await agent.client.get(path)).status_code != 405}
        assert own > ADMIN and not agent.agent.drain_requested.is_set()
    async with serving(Folder(tmp_path / "batch"), tmp_path / "batch") as client:
        found["batch server"] = set(await _routes(client, SAFE))
    assert found == READS


async def _routes(client: TestClient, methods: set[str]) -> list[str]:
    assert isinstance(client.server, TestServer)
    return [route.resource.canonical for route in client.server.app.router.routes() if route.resource and route.method in methods]


@pytest.mark.parametrize("origin", FOREIGN)
async def test_a_web_page_of_another_origin_changes_nothing(fleet: Fleet, tmp_path: Path, origin: str) -> None:
    headers = {"origin": origin}
    router = await fleet.router(await fleet.worker(), console=True, batch_url=f"http://127.0.0.1:{free_port()}")
    changing = [path for path, methods in paths.METHODS.items() if path in paths.ADMIN and not SAFE.issuperset(methods)]
    assert changing == ["/fairlead/score", "/fairlead/demand"]
    for path in (*changing, *ROOTS, "/v1/batches/batch_1/cancel", "/ui/login", "/ui/logout"):
        assert (await router.client.post(path, headers=headers)).status_code == 403, path
    assert (await router.client.post("/v1/batches")).status_code == 503, "of a program: it is forwarded, and there is no batch server"
    async with serving(Folder(tmp_path), tmp_path) as client:
        for method in ("POST", "DELETE"):
            for path in await _routes(client, {method}):
                assert (await client.request(method, path.format(id="file-in"), headers=headers)).status == 403, path
        assert (await client.get("/v1/files/file-in")).status == 200


async def test_a_page_that_is_allowed_may_send_batches(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    router = await fleet.router(await fleet.worker(), batch_url=url, allowed_origins=FOREIGN[0])
    assert (await router.client.post("/v1/batches", headers={"origin": FOREIGN[0]})).status_code == 503
    assert (await router.client.post("/v1/batches", headers={"origin": FOREIGN[1]})).status_code == 403
