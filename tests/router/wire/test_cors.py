"""`--allowed-origins`: which web pages may call, and what a preflight says."""

import pytest
from tests.admin_paths import ROUTER
from tests.router.harness import Fleet
from tests.router.stand_in_worker import Exchange

ORIGIN = "https://chat.example.com"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization, x-request-id"}


async def test_listed_origins_may_call(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(), allowed_origins=f"https://other.example,{ORIGIN}")
    preflight = await router.client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert preflight.headers["access-control-allow-methods"] == "POST"
    assert preflight.headers["access-control-allow-headers"] == "authorization, x-request-id"
    body = {"model": "stand-in", "prompt": "hello"}
    answer = await router.client.post("/v1/completions", json=body, headers={"origin": ORIGIN})
    assert (answer.status_code, answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (200, ORIGIN, "Origin")
    refused = await router.client.post("/v1/completions", content=b"{", headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, ORIGIN), "the page can read the error"


async def test_other_origins_get_no_permission(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(), allowed_origins=ORIGIN)
    other = {"origin": "https://chat.example.com.evil.example"}
    preflight = await router.client.options("/v1/completions", headers=PREFLIGHT | other)
    assert preflight.status_code == 403 and "access-control-allow-origin" not in preflight.headers
    models = await router.client.get("/v1/models", headers=other)
    assert models.status_code == 200 and "access-control-allow-origin" not in models.headers


@pytest.mark.parametrize("path", ROUTER)
async def test_admin_paths_on_the_same_port_refuse_web_pages(fleet: Fleet, path: str) -> None:
    router = await fleet.router(await fleet.worker(), allowed_origins="*")
    method = "POST" if path == "/fairlead/score" else "GET"
    for origin in (ORIGIN, "null"):
        for answer in (
            await router.client.request(method, path, headers={"origin": origin}),
            await router.client.options(path, headers=PREFLIGHT | {"origin": origin}),
        ):
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "forbidden_origin"
            assert not [name for name in answer.headers if name.startswith("access-control-")]
    same = str(router.client.base_url).rstrip("/")
    assert (await router.client.get("/fairlead/workers", headers={"origin": same})).status_code == 200


async def test_off_by_default_and_a_star_allows_all(fleet: Fleet) -> None:
    worker = await fleet.worker()
    closed, opened = await fleet.router(worker), await fleet.router(worker, allowed_origins='["*"]')
    assert (await closed.client.options("/v1/completions", headers=PREFLIGHT)).status_code == 405
    assert (await opened.client.options("/v1/completions", headers=PREFLIGHT)).headers["access-control-allow-origin"] == "*"
    assert (await opened.client.get("/v1/models", headers={"origin": ORIGIN})).headers["access-control-allow-origin"] == "*"


async def test_the_worker_does_not_get_the_origin_and_so_adds_no_second_header(fleet: Fleet) -> None:
    seen: list[dict[str, str]] = []

    async def records(exchange: Exchange) -> None:
        seen.append(exchange.request.headers)
        await exchange.whole(200, {"choices": []})

    router = await fleet.router(await fleet.worker(behaviour=records), allowed_origins=ORIGIN)
    body = {"model": "stand-in", "prompt": "hello"}
    await router.client.post("/v1/completions", json=body, headers={"origin": ORIGIN})
    assert "origin" not in seen[0]


@pytest.mark.parametrize("value", ["chat.example.com", "https://chat.example.com/path", '["*"', "https://a b"])
async def test_what_is_no_origin_is_refused_at_the_start(fleet: Fleet, value: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins"):
        await fleet.router(allowed_origins=value)
