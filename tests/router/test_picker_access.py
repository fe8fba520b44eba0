"""Keys, quotas and salts hold for a gateway's clients as for the router's own."""

import json
from pathlib import Path

from tests.router.gateway import gateway, set_headers
from tests.router.harness import Fleet
from tests.router.test_access import ANNA, BORIS, SECRET, guarded

from fairlead_index.salts import cache_salt

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "hello there", "max_tokens": 50}).encode()


async def test_a_key_is_asked_for_before_the_body_and_stands_for_its_tenant(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path, {"anna": {"priority": -5}, "boris": {}}, picker_port=0, picker_tls="off")
    assert router.server.router.picker is not None
    async with gateway(router.server.router.picker.port) as asking:
        for headers in ({}, {"authorization": "Bearer fl-wrong"}, {"x_api_key": "no"}):
            exchange = asking.exchange()
            await exchange.headers(PATH, **headers)
            status, body, _ = await exchange.refused()
            assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"
        exchange = asking.exchange()
        await exchange.request(PATH, BODY, authorization=f"Bearer {ANNA}", x_fairlead_tenant="boris", x_fairlead_cache_salt="forged")
        mutation = (await exchange.read()).request_headers.response.header_mutation
        said = set_headers(mutation)
        assert said["x-fairlead-cache-salt"] == cache_salt(SECRET.encode(), "tenant:anna", "")
        assert said["x-fairlead-tenant"] == "anna" and said["x-fairlead-priority"] == "-5"
        assert {"x-fairlead-tenant", "x-fairlead-cache-salt", "authorization", "x-api-key"} <= set(mutation.remove_headers)
        exchange.call.cancel()


async def test_a_tenants_bucket_is_one_for_both_ways_in(fleet: Fleet, tmp_path: Path) -> None:
    tenants = {"anna": {"tokensPerMinute": 6, "burstTokens": 100}, "boris": {}}
    router, _ = await guarded(fleet, tmp_path, tenants, picker_port=0, picker_tls="off")
    assert router.server.router.picker is not None
    async with gateway(router.server.router.picker.port) as asking:

        async def ask(key: str = ANNA, status: int = 200) -> None:
            exchange = asking.exchange()
            await exchange.request(PATH, BODY, authorization=f"Bearer {key}")
            await exchange.picked()
            await exchange.streamed()
            await exchange.respond(status, x_fairlead_usage="11 50")
            await exchange.response_body(b"", end=True)

        for _ in range(3):
            await ask(status=400)  # refused by the worker: nothing is charged
        await ask()
        exchange = asking.exchange()
        await exchange.request(PATH, BODY, authorization=f"Bearer {ANNA}")
        status, body, headers = await exchange.refused()
        assert status == 429 and json.loads(body)["error"]["code"] == "rate_limit_exceeded" and int(headers["retry-after"]) > 60
        assert (await router.client.post(PATH, content=BODY, headers={"authorization": f"Bearer {ANNA}"})).status_code == 429
        await ask(BORIS)


async def test_all_prompts_of_a_request_are_charged_and_its_refusal_is_counted(fleet: Fleet, tmp_path: Path) -> None:
    tenants = {"anna": {"tokensPerMinute": 6, "burstTokens": 400}}
    router, _ = await guarded(fleet, tmp_path, tenants, picker_port=0, picker_tls="off")
    assert router.server.router.picker is not None
    body = json.dumps({"prompt": ["short", *["word " * 100] * 4], "max_tokens": 1}).encode()  # only the first is tokenized here
    async with gateway(router.server.router.picker.port) as asking:
        exchange = asking.exchange()
        await exchange.request(PATH, body, authorization=f"Bearer {ANNA}")
        await exchange.picked()
        (account,) = (one for name, one in router.server.router.front._accounts._accounts.items() if name == "anna")
        assert account.level <= 400 - len(body) // 4
        exchange.call.cancel()
        exchange = asking.exchange()
        await exchange.request(PATH, body, authorization=f"Bearer {ANNA}")
        assert (await exchange.refused())[0] == 429
    refused = (await router.client.get("/metrics")).text
    assert 'fairlead_router_refused_total{reason="quota"} 1.0' in refused
