"""Keys, quotas and salts hold for a gateway's clients as for the router's own."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from tests.router.gateway import gateway, set_headers
from tests.router.harness import Fleet, eventually
from tests.router.interop.picker import in_flight
from tests.router.tenancy.test_access import ANNA, BORIS, SECRET, guarded
from tests.router.tenancy.test_quota import level

from fairlead_index.salts import cache_salt
from fairlead_router.interop.picker import server
from fairlead_router.request.price import LEFT_PRICE

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "hello there", "max_tokens": 50}).encode()


async def test_the_key_is_checked_before_the_body_and_determines_the_tenant(fleet: Fleet, tmp_path: Path) -> None:
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


async def test_a_gateways_request_has_a_class_too(fleet: Fleet, tmp_path: Path) -> None:
    classes = '[{"name": "chat", "priority": 3, "ttftMilliseconds": 60000}]'
    router, _ = await guarded(fleet, tmp_path, slo_classes=classes, default_slo_class="batch", picker_port=0, picker_tls="off")
    assert router.server.router.picker is not None
    async with gateway(router.server.router.picker.port) as asking:
        exchange = asking.exchange()
        await exchange.request(PATH, BODY, authorization=f"Bearer {ANNA}", x_slo_class="chat")
        mutation = (await exchange.read()).request_headers.response.header_mutation
        said = set_headers(mutation)
        assert said["x-fairlead-priority"] == "3"
        assert "x-slo-class" in mutation.remove_headers
        exchange.call.cancel()
        exchange = asking.exchange()
        await exchange.headers(PATH, authorization=f"Bearer {ANNA}", x_slo_class="caht")
        status, body, _ = await exchange.refused()
        assert status == 400 and json.loads(body)["error"]["code"] == "unknown_slo_class"


async def test_a_tenant_has_one_bucket_for_gateway_and_router(fleet: Fleet, tmp_path: Path) -> None:
    tenants = {"anna": {"tokensPerMinute": 6, "burstTokens": 475}, "boris": {}}
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
            await ask(status=400)  # the worker refuses it, which costs 125 tokens
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
        (account,) = (one for name, one in router.server.router.handler._accounts._accounts.items() if name == "anna")
        assert account.level <= 400 - len(body) // 4
        exchange.call.cancel()
        exchange = asking.exchange()
        await exchange.request(PATH, body, authorization=f"Bearer {ANNA}")
        assert (await exchange.refused())[0] == 429
    refused = (await router.server.router.metrics.render()).decode()
    assert 'fairlead_router_refused_total{reason="quota"} 1.0' in refused
    assert all(f'fairlead_router_picks_total{{code="{code}"}} 1.0' in refused for code in (200, 429)), "also before the body"


async def test_tokenize_requests_are_charged_too(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path, {"anna": {"tokensPerMinute": 6, "burstTokens": 100}}, picker_port=0, picker_tls="off")
    assert router.server.router.picker is not None
    async with gateway(router.server.router.picker.port) as asking:
        exchange = asking.exchange()
        await exchange.headers("/tokenize", authorization=f"Bearer {ANNA}", content_length="4000")
        await exchange.read()
        (account,) = (one for name, one in router.server.router.handler._accounts._accounts.items() if name == "anna")
        assert account.level < -800
        exchange.call.cancel()


@pytest.mark.parametrize("runtime", ["", "vllm"])
async def test_a_gateways_client_that_leaves_before_its_answer_pays_as_the_routers(fleet: Fleet, tmp_path: Path, runtime: str) -> None:
    """A worker reports what it computed with the tenant's next answer. An agent does not, so there the expected tokens stay charged."""
    tenants = {"anna": {"tokensPerMinute": 6, "burstTokens": 10_000}}
    router, _ = await guarded(fleet, tmp_path, tenants, picker_port=0, picker_tls="off")
    assert router.server.router.picker is not None
    for worker in router.table:
        worker.runtime = runtime
    body = json.dumps({"prompt": "word " * 100, "max_tokens": 200}).encode()
    async with gateway(router.server.router.picker.port) as asking:
        exchange = asking.exchange()
        await exchange.request(PATH, body, authorization=f"Bearer {ANNA}")
        await exchange.picked()
        expected = 10_000 - level(router)
        exchange.call.cancel()
        await eventually(lambda: not in_flight(router), "it has ended")
    paid = 10_000 - level(router) - LEFT_PRICE
    assert expected > 300 and paid == pytest.approx(expected if runtime else 0, abs=150)


async def test_bodies_from_a_gateway_count_against_max_inflight_bytes(fleet: Fleet) -> None:
    """--max-inflight-bytes bounds them together, until each is forwarded or its stream ends."""
    router = await fleet.router(await fleet.worker(), picker_port=0, picker_tls="off", max_inflight_bytes=1_000_000)
    assert router.server.router.picker is not None
    bodies = router.server.router.handler.body_budget
    async with gateway(router.server.router.picker.port) as asking:
        half = asking.exchange()
        await half.headers(PATH)
        await half.body(b" " * 600_000, end=False)
        await eventually(lambda: bodies.total == 600_000, "it is counted")
        other = asking.exchange()
        await other.headers(PATH)
        await other.body(b" " * 600_000, end=False)
        status, body, headers = await other.refused()
        assert status == 503 and b"--max-inflight-bytes" in body and headers["retry-after"] == "1"
        await half.body(BODY)
        await half.picked()
        await half.streamed()
        await eventually(lambda: bodies.total == 0, "it is passed on")
        half.call.cancel()
        gone = asking.exchange()
        await gone.headers(PATH)
        await gone.body(b" " * 600_000, end=False)
        await eventually(lambda: bodies.total == 600_000, "it is counted")
        gone.call.cancel()
        await eventually(lambda: bodies.total == 0, "its stream has ended")


async def test_messages_and_streams_of_a_gateway_are_bounded(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STREAMS", 3, raising=False)
    router = await fleet.router(await fleet.worker(), picker_port=0, picker_tls="off", max_body_bytes=100_000)
    assert router.server.router.picker is not None
    async with gateway(router.server.router.picker.port) as asking:
        large = asking.exchange()
        await large.headers(PATH)
        await large.body(b" " * 2_000_000, end=False)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await large.read()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        long = asking.exchange()
        await long.headers(PATH, x_long="x" * 70_000)
        assert (await long.refused())[0] == 431
        assert await router.metric("fairlead_router_picks_total") == 1
        exchanges = [asking.exchange() for _ in range(4)]
        for exchange in exchanges[:3]:
            await exchange.request(PATH, BODY)
            await exchange.picked()
        waiting = asyncio.create_task(exchanges[3].request(PATH, BODY))
        await asyncio.wait([waiting], timeout=0.3)
        assert sum(worker.in_flight for worker in router.table) == 3
        exchanges[0].call.cancel()
        await waiting
        await exchanges[3].picked()
        for exchange in exchanges:
            exchange.call.cancel()
