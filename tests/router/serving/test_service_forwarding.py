"""One endpoint for the models of several services: two services' routers, and requests that the `model` field sends to the other one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.prompt_format import make_format
from tests.router.stand_in_worker import Exchange, StandIn
from tests.router.tenancy.test_access import ANNA, BORIS, bearer, key_file
from tests.servers.otlp_receiver import otlp_receiver

from fairlead_operator.polling.prober import Prober, RequestCounts
from fairlead_router.tenancy.shared_secret import SharedSecret

ADAPTER = {"adapters": {"sql": {"digest": "d1", "root": "hf://lab/sql", "parent": "beta"}}}


def list_services(file: Path, **services: tuple[str, list[str]]) -> None:
    fresh = file.with_suffix(".new")
    listed = [{"name": name, "url": url, "models": models} for name, (url, models) in services.items()]
    fresh.write_text(json.dumps({"services": listed}))
    fresh.replace(file)


def url(router: RunningRouter) -> str:
    return f"http://127.0.0.1:{router.port}"


async def service(fleet: Fleet, model: str, *, load: Any = None, **settings: Any) -> tuple[RunningRouter, StandIn]:
    worker = await fleet.worker(format=make_format(model), load=load or {})
    return await fleet.router(worker, service_name=model, **settings), worker


async def pair(fleet: Fleet, tmp_path: Path, front: Any = None, **settings: Any) -> tuple[RunningRouter, StandIn, RunningRouter, StandIn]:
    """Return the service `alpha`, whose endpoint also serves `beta` and its adapter, and `beta`."""
    beta, beta_worker = await service(fleet, "beta", load=ADAPTER, **settings)
    file = tmp_path / "routes.json"
    list_services(file, beta=(url(beta), ["beta", "sql"]))
    alpha, alpha_worker = await service(fleet, "alpha", model_routes_file=str(file), **(front or {}))
    return alpha, alpha_worker, beta, beta_worker


async def ask(router: RunningRouter, model: str, path: str = "/v1/completions", key: str = "", **fields: Any) -> httpx.Response:
    content = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hello there"}
    return await router.client.post(path, json={"model": model, **content, **fields}, headers=bearer(key) if key else {})


async def test_the_model_field_selects_the_service(fleet: Fleet, tmp_path: Path) -> None:
    alpha, alpha_worker, beta, beta_worker = await pair(fleet, tmp_path)
    for model, worker, other in (
        ("alpha", alpha_worker, beta_worker),
        ("beta", beta_worker, alpha_worker),
        ("sql", beta_worker, alpha_worker),
    ):
        for path in ("/v1/completions", "/v1/chat/completions"):
            worker.received.clear()
            other.received.clear()
            answer = await ask(alpha, model, path)
            assert answer.status_code == 200, answer.text
            assert worker.received[-1].json["model"] == model and not other.received
    listed = (await alpha.client.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == ["alpha", "beta", "sql"] and {one["object"] for one in listed} == {"model"}
    assert (await alpha.client.get("/v1/models/sql")).json()["id"] == "sql"
    unknown = await ask(alpha, "gamma")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert (await ask(beta, "alpha")).status_code == 404, "beta lists no other service"
    assert not [one for one in alpha.table if one.in_flight]


async def test_streams_pass_through_as_they_come_and_end_with_their_client(fleet: Fleet, tmp_path: Path) -> None:
    alpha, _, _, worker = await pair(fleet, tmp_path)
    gate, gone = asyncio.Event(), asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("one")
        if exchange.request.json["prompt"] == "leave":
            await exchange.until_client_gone()
            gone.set()
            return
        await gate.wait()
        await exchange.event("two")
        await exchange.end()

    worker.behaviour = waits
    body = {"model": "beta", "prompt": "stay", "stream": True}
    async with alpha.client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "from-the-client"}) as answer:
        pieces = answer.aiter_bytes()
        assert b"one" in await anext(pieces), "before the answer ends"
        assert answer.headers["x-request-id"] == "from-the-client" and answer.headers["content-type"].startswith("text/event-stream")
        gate.set()
        assert b"".join([piece async for piece in pieces]).endswith(b"data: [DONE]\n\n")
    async with alpha.client.stream("POST", "/v1/completions", json=body | {"prompt": "leave"}) as answer:
        assert b"one" in await anext(answer.aiter_bytes())
    await asyncio.wait_for(gone.wait(), 10)


async def test_each_service_checks_the_client_s_key_and_counts_its_own_quota(fleet: Fleet, tmp_path: Path) -> None:
    shared, theirs = tmp_path / "keys.yaml", tmp_path / "theirs.yaml"
    shared.write_text(key_file())
    theirs.write_text(key_file({"anna": {}}))
    alpha, _, _, worker = await pair(fleet, tmp_path, {"api_keys_file": str(shared)}, api_keys_file=str(theirs))
    assert (await ask(alpha, "beta", key=ANNA)).status_code == 200
    headers = worker.received[-1].headers
    assert headers["x-fairlead-tenant"] == "anna" and "authorization" not in headers and "x-fairlead-forwarded" not in headers
    assert (await ask(alpha, "beta", key=BORIS)).status_code == 401, "beta does not know this key"
    assert (await ask(alpha, "alpha", key=BORIS)).status_code == 200
    assert (await ask(alpha, "beta", key="sk-none")).status_code == 401
    forged = await alpha.client.post(
        "/v1/completions", json={"model": "beta", "prompt": "x"}, headers=bearer(ANNA) | {"x-fairlead-tenant": "boris"}
    )
    assert forged.status_code == 200 and worker.received[-1].headers["x-fairlead-tenant"] == "anna"


async def test_a_service_that_restarts_fails_no_request_and_one_that_is_gone_answers_503(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "routes.json"
    worker = await fleet.worker(format=make_format("beta"))

    async def drops_the_second_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A router that leaves: it serves one request of a kept connection, and closes under the next one."""
        nonlocal drops
        for number in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")).split(b":")[1])
            await reader.readexactly(length)
            if number:
                drops += 1
                writer.transport.abort()
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()

    drops = 0
    leaving = await asyncio.start_server(drops_the_second_request, "127.0.0.1", 0)
    port = leaving.sockets[0].getsockname()[1]
    list_services(file, beta=(f"http://127.0.0.1:{port}", ["beta"]))
    alpha, _ = await service(fleet, "alpha", model_routes_file=str(file))
    for _ in range(6):
        assert (await ask(alpha, "beta")).status_code == 200
    assert drops >= 2, "connections were lost before an answer, and the requests sent again"
    leaving.close()
    await eventually(lambda: _has_status(alpha, 503), "nobody answers for beta")
    refused = await ask(alpha, "beta")
    assert refused.json()["error"]["code"] == "service_unavailable" and "beta" in refused.text and refused.headers["retry-after"] == "2"
    assert (await ask(alpha, "alpha")).status_code == 200
    beta = await fleet.router(worker)
    list_services(file, beta=(url(beta), ["beta", "new-adapter"]))
    await eventually(lambda: _has_status(alpha, 200), "the file's next version is used")
    file.write_text("{")
    await asyncio.sleep(1.5)
    assert (await ask(alpha, "beta")).status_code == 200, "a broken version is not used"
    list_services(file)
    await eventually(lambda: _has_status(alpha, 404), "beta is no longer listed")


async def _has_status(router: RunningRouter, status: int) -> bool:
    return (await ask(router, "beta")).status_code == status


async def test_outdated_files_of_two_services_make_no_loop_and_own_models_come_first(fleet: Fleet, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    alpha, alpha_worker = await service(fleet, "alpha", model_routes_file=str(files[0]))
    beta, _ = await service(fleet, "beta", model_routes_file=str(files[1]))
    list_services(files[0], beta=(url(beta), ["moved", "alpha"]))
    list_services(files[1], alpha=(url(alpha), ["moved"]))
    await eventually(lambda: _lists(alpha, "moved"), "alpha has read its file")
    await eventually(lambda: _lists(beta, "moved"), "beta has read its file")
    assert (await ask(alpha, "moved")).status_code == 404
    assert (await ask(alpha, "alpha")).status_code == 200 and alpha_worker.received[-1].json["model"] == "alpha"


async def _lists(router: RunningRouter, model: str) -> bool:
    return model in [one["id"] for one in (await router.client.get("/v1/models")).json()["data"]]


@pytest.mark.parametrize("tenant", ["", "anna"])
async def test_a_batch_line_reaches_no_other_service_nor_does_the_batch_servers_secret(fleet: Fleet, tmp_path: Path, tenant: str) -> None:
    secret, keys = tmp_path / "secret", tmp_path / "keys.yaml"
    secret.write_text("a secret that routers and batch server share")
    keys.write_text(key_file())
    front = {"batch_secret_file": str(secret), "api_keys_file": str(keys) if tenant else ""}
    alpha, alpha_worker, _, beta_worker = await pair(fleet, tmp_path, front)
    headers = SharedSecret(str(secret)).headers(tenant)

    async def send(model: str) -> httpx.Response:
        return await alpha.client.post("/v1/completions", json={"model": model, "prompt": "x"}, headers=headers)

    assert (await send("alpha")).status_code == 200
    assert alpha_worker.received[-1].headers.get("x-fairlead-tenant", "") == tenant
    for model in ("beta", "gamma"):
        refused = await send(model)
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    assert not beta_worker.received


async def test_the_service_of_the_model_applies_its_own_classes(fleet: Fleet, tmp_path: Path) -> None:
    ours, theirs = json.dumps([{"name": "chat", "ttftMilliseconds": 60_000}]), json.dumps([{"name": "theirs", "priority": -3}])
    front = {"slo_classes": ours, "default_slo_class": "chat"}
    alpha, _, _, worker = await pair(fleet, tmp_path, front, slo_classes=theirs)

    async def send(model: str, name: str) -> httpx.Response:
        return await alpha.client.post("/v1/completions", json={"model": model, "prompt": "x"}, headers={"x-slo-class": name})

    assert (await send("beta", "theirs")).status_code == 200, "a class that the front does not have"
    assert worker.received[-1].headers["x-fairlead-priority"] == "-3"
    assert (await ask(alpha, "beta")).status_code == 200, "the front's default is none of its classes"
    for model, name in (("beta", "chat"), ("alpha", "theirs")):
        refused = await send(model, name)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "unknown_slo_class"
    assert await alpha.metric("fairlead_router_slo_requests_total") == 0, (
        "a forwarded request neither meets nor misses the front's objectives"
    )
    assert (await ask(alpha, "alpha")).status_code == 200
    assert await alpha.metric("fairlead_router_slo_requests_total") == await alpha.metric("fairlead_router_slo_good_requests_total") == 1


async def test_a_service_that_redirects_answers_through_the_front(fleet: Fleet, tmp_path: Path) -> None:
    alpha, _, beta, worker = await pair(fleet, tmp_path, forwarding_mode="redirect")
    assert (await ask(beta, "beta")).status_code == 307, "its own clients go to the worker"
    answer = await ask(alpha, "beta")
    assert answer.status_code == 200 and "location" not in answer.headers and worker.received[-1].json["model"] == "beta"


async def test_errors_of_another_service_do_not_count_as_the_front_s(fleet: Fleet, tmp_path: Path) -> None:
    """The operator would stop a rollout of the front for them, and the front's error budget would pay for them."""
    alpha, _, _, _ = await pair(fleet, tmp_path)
    assert (await ask(alpha, "alpha")).status_code == (await ask(alpha, "beta")).status_code == 200
    list_services(tmp_path / "routes.json", beta=("http://127.0.0.1:9", ["beta"]))
    await eventually(lambda: _has_status(alpha, 503), "nobody answers for beta")
    prober = Prober("cluster.local")
    try:
        assert await prober.fetch_request_counts(f"127.0.0.1:{alpha.port}") == RequestCounts(1, 0)
    finally:
        await prober.close()
    text = (await alpha.server.router.metrics.render()).decode()
    for code in (200, 503):
        assert f'fairlead_router_forwarded_requests_total{{code="{code}",other_service="beta"}}' in text


@pytest.mark.parametrize("traced", [True, False])
async def test_the_other_service_gets_credentials_and_the_router_s_span_but_no_header_of_the_connection(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced: bool
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    beta = await fleet.worker(format=make_format("beta"))  # instead of a router: it shows what arrives
    list_services(tmp_path / "routes.json", beta=(f"http://{beta.address}", ["beta"]))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    passed = {
        "authorization": "Bearer fl-key",
        "x-api-key": "fl-key",
        "x-slo-class": "theirs",
        "x-session-id": "s",
        "user-agent": "client/1",
    }
    dropped = {"connection": "keep-alive, x-hop", "x-hop": "1", "proxy-authorization": "Basic eA==", "cookie": "a=b", "origin": "https://x"}
    with otlp_receiver() as receiver:
        flags = {"otlp_traces_endpoint": receiver.endpoint} if traced else {}
        alpha, _ = await service(fleet, "alpha", model_routes_file=str(tmp_path / "routes.json"), **flags)
        headers = passed | dropped | {"traceparent": f"00-{trace}-{parent}-01", "x-fairlead-tenant": "boris"}
        assert (await alpha.client.post("/v1/completions", json={"model": "beta", "prompt": "x"}, headers=headers)).status_code == 200
        seen = beta.received[-1].headers
        assert seen.items() >= (passed | {"x-fairlead-forwarded": "1"}).items()
        assert not seen.keys() & ((dropped.keys() - {"connection"}) | {"x-fairlead-tenant"})
        version, its_trace, its_parent, sampled = seen["traceparent"].split("-")
        assert (version, its_trace, sampled) == ("00", trace, "01")
        if not traced:
            assert its_parent == parent
            return
        await eventually(lambda: {span.name for span in receiver.of_trace(trace)} >= {"POST /v1/completions", "attempt"}, "spans arrive")
        spans = {span.name: span for span in receiver.of_trace(trace)}
        request, attempt = spans["POST /v1/completions"], spans["attempt"]
        assert (request.parent_id, attempt.parent_id, its_parent) == (parent, request.span_id, attempt.span_id)
        assert attempt.attributes["fairlead.service"] == "beta" and attempt.attributes["http.response.status_code"] == 200
