"""The web console at `/ui`: off by default, behind the service's API keys, escaped and bounded."""

import hashlib
import logging
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.router.harness import Fleet, eventually
from tests.router.tenancy.test_access import ANNA, BORIS, ask, bearer, guarded, key_file
from tests.router.tenancy.test_quota import SLOW
from tests.router.wire.test_tls import EXTENSIONS, Authority, client_of
from tests.servers.redis_server import RedisServer

from fairlead_index.worker_load import WorkerLoad
from fairlead_router.console.console import REQUESTS_ON_PAGE
from fairlead_router.console.fleet import MAX_PODS, describe_fleet
from fairlead_router.console.session import SESSION_SECONDS, create_token, is_valid, read_digest
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.request.price import RENDERED_PRICE
from fairlead_router.request.request_log import MAX_REQUESTS
from fairlead_router.routing.prefix_aware import PrefixAware

COOKIE = "fairlead_console_" + hashlib.sha256(b"default/fairlead").hexdigest()[:12]
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def test_it_is_off_by_default_and_then_nothing_is_recorded(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    await router.complete()
    for path in ("/ui", "/ui/requests", "/ui/prefixes", "/ui/state.json", "/ui/console.js"):
        assert (await router.client.get(path)).status_code == 404
    assert router.server.router.request_log is None


async def test_pages_load_nothing_from_elsewhere_and_say_when_they_are_empty(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(load={"running": 3, "pages_total": 10, "pages_free": 4}), console=True)
    for path in ("/ui", "/ui/requests", "/ui/prefixes", "/ui/console.css", "/ui/console.js"):
        answer = await router.client.get(path)
        assert answer.status_code == 200 and "://" not in answer.text
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in answer.headers["content-security-policy"]
    fleet_page = (await router.client.get("/ui")).text
    assert "pod-0" in fleet_page and "60 %" in fleet_page, "the first state is in the page, without the script"
    assert "No requests yet" in (await router.client.get("/ui/requests")).text
    assert (await router.client.get("/ui/other")).status_code == 404
    assert (await router.client.post("/ui")).status_code == 405


async def test_names_from_workers_and_clients_are_escaped(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(pod=HOSTILE), console=True)
    await router.client.post("/v1/completions", json={"prompt": "hello"}, headers={"x-request-id": HOSTILE})
    for path in ("/ui", "/ui/requests"):
        text = (await router.client.get(path)).text
        assert HOSTILE not in text and "&lt;script&gt;alert(1)" in text


async def test_a_request_is_shown_with_every_candidates_score(fleet: Fleet, redis: RedisServer) -> None:
    namespace = f"tests/{uuid.uuid4().hex[:8]}"
    workers = [await fleet.worker(redis=(redis.url, namespace), load={"prefill_rate": 4000.0}) for _ in range(3)]
    router = await fleet.router(*workers, redis_url=redis.url, index_namespace=namespace, index_mode="mirror", console=True)
    policy, log = router.server.router.policy, router.server.router.request_log
    assert isinstance(policy, PrefixAware) and log is not None
    await eventually(lambda: all(worker.joined for worker in workers) and policy.read_mode == "mirror", "the mirror is used")
    answer = await router.complete("a secret text " * 30, stream=True)
    (record,) = log.newest(None)
    assert len(record.outcome.candidates) == 3 and record.chosen is record.outcome.candidates[0]
    assert record.time_to_first_token is not None and record.outcome.predicted_tokens == record.outcome.cached_tokens == 0
    assert not record.outcome.hashes, "a log must not keep prompts alive"
    page = (await router.client.get("/ui/requests")).text
    assert answer.headers["x-request-id"] in page and all(worker.pod in page for worker in workers) and "backlog" in page
    assert "secret" not in page


async def test_the_key_gives_a_session_and_a_tenant_sees_only_its_own_requests(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    router, _ = await guarded(fleet, tmp_path, console=True)
    for key in (ANNA, BORIS):
        assert (await ask(router, key)).status_code == 200
    for headers in ({}, bearer("fl-wrong"), {"cookie": f"{COOKIE}=AAAA"}, {"cookie": f"{COOKIE}=%C3"}):
        for path in ("/ui", "/ui/requests", "/ui/state.json"):
            refused = await router.client.get(path, headers=headers)
            assert refused.status_code == 401 and 'name="key"' in refused.text and "pod-0" not in refused.text
    assert (await router.client.post("/ui/login", data={"key": "fl-wrong"})).status_code == 401
    assert "console login refused with status 401" in caplog.text and "fl-wrong" not in caplog.text
    assert (await router.client.get("/ui/login")).headers["location"] == "/ui", "the address after a wrong key can be opened again"
    assert (await router.client.post("/ui/login", data={"key": "x" * 5000})).status_code == 413
    other_site = {"sec-fetch-site": "cross-site"}
    assert (await router.client.post("/ui/login", data={"key": ANNA}, headers=other_site)).status_code == 403
    other_origin = {"origin": "http://other.example"}
    assert (await router.client.post("/ui/login", data={"key": ANNA}, headers=other_origin)).status_code == 403
    router.client.cookies.set("other{app", 'a "value', path="/ui")  # of another application on this host
    entered = await router.client.post("/ui/login", data={"key": ANNA})
    cookie = entered.headers["set-cookie"]
    assert entered.status_code == 303 and entered.headers["location"] == "/ui"
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/ui" in cookie and ANNA not in cookie
    seen = (await router.client.get("/ui/requests")).text  # the client keeps the cookie
    assert seen.count("<details>") == 1
    router.client.cookies.clear()
    assert (await router.client.get("/ui/requests", headers=bearer(BORIS))).text.count("<details>") == 1
    assert ANNA not in caplog.text and BORIS not in caplog.text


async def test_a_page_costs_its_tenant_tokens_and_one_in_debt_sees_none(fleet: Fleet, tmp_path: Path) -> None:
    """The figures are free: an open page asks for them all the time."""
    router, _ = await guarded(fleet, tmp_path, SLOW, console=True)
    account = router.server.router.handler._accounts.of(router.server.router.handler.keys.authenticate(ANNA.encode()).tenant)
    account.use(account.refill() - RENDERED_PRICE / 2)
    assert (await router.client.get("/ui/requests", headers=bearer(ANNA))).status_code == 200
    refused = await router.client.get("/ui/requests", headers=bearer(ANNA))
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0 and "Rate limit" in refused.text
    assert (await router.client.get("/ui/state.json", headers=bearer(ANNA))).status_code == 200


async def test_the_cookie_is_secure_where_the_browser_uses_tls(fleet: Fleet, tmp_path: Path) -> None:
    """Otherwise a plain request to the same host, which an attacker can cause, would carry the session."""
    authority, keys = Authority(tmp_path), tmp_path / "keys.yaml"
    authority.mount()
    keys.write_text(key_file())
    worker, settings = await fleet.worker(), {"console": True, "api_keys_file": str(keys)}
    plain = await fleet.router(worker, **settings)
    encrypted = await fleet.router(worker, **settings, ssl_certfile=authority.certfile, ssl_keyfile=authority.keyfile, admin_port=0)
    login: Any = {"url": "/ui/login", "data": {"key": ANNA}}
    assert "; Secure" not in (await plain.client.post(**login)).headers["set-cookie"]
    behind_proxy = await plain.client.post(**login, headers={"x-forwarded-proto": "https"})
    assert "; Secure" in behind_proxy.headers["set-cookie"]
    async with client_of(authority, encrypted.port) as client:
        answer = await client.post(**login, **EXTENSIONS)
        assert answer.status_code == 303 and "; Secure" in answer.headers["set-cookie"]
    admin = f"http://127.0.0.1:{encrypted.server.admin_port}/ui/login"
    assert "; Secure" not in (await plain.client.post(admin, data=login["data"])).headers["set-cookie"], "it would be lost"


async def test_a_removed_key_ends_its_session_and_the_admin_port_shows_all_tenants(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path, console=True, admin_port=0)
    for key in (ANNA, BORIS):
        assert (await ask(router, key)).status_code == 200
    admin = f"http://127.0.0.1:{router.server.admin_port}/ui/requests"
    assert (await router.client.get(admin)).status_code == 401
    assert (await router.client.get(admin, headers=bearer(BORIS))).text.count("<details>") == 2
    await router.client.post("/ui/login", data={"key": BORIS})
    assert (await router.client.get("/ui")).status_code == 200
    (tmp_path / "keys.yaml").write_text(key_file({"anna": {}}))
    router.server.router.handler.keys._file.reload()
    assert (await router.client.get("/ui")).status_code == 401


def test_a_session_ends_and_cannot_be_forged() -> None:
    digest, secret = b"d" * 32, b"a secret of the key file"
    token = create_token(digest, secret, 1000.0)
    assert read_digest(token) == digest and is_valid(token, secret, 1001.0)
    assert not is_valid(token, secret, 1000.0 + SESSION_SECONDS) and not is_valid(token, b"another", 1001.0)
    assert not is_valid("", secret, 0.0) and not read_digest("%%%") and not is_valid(token[:-4] + "AAA=", secret, 1001.0)


async def test_the_state_of_500_pods_is_small_and_that_of_more_is_bounded() -> None:
    table = WorkerTable()
    for count, limit in ((500, 65_000), (5000, 200_000)):
        table.set_addresses({f"10.0.{number // 250}.{number % 250}:8000" for number in range(count)})
        for worker in table:
            worker.pod, worker.load = "p" * 300, WorkerLoad(running=100, waiting=100, prefill_rate=123456.7, pages_total=7, pages_free=3)
        state = describe_fleet(table)
        assert len(state["pods"]) == min(count, MAX_PODS) and state["omitted"] == count - len(state["pods"])
        assert state["totals"]["pods"] == count and len(msgspec.json.encode(state)) < limit


async def test_the_log_of_requests_is_a_ring(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(), console=True)
    for _ in range(MAX_REQUESTS + 5):
        await router.complete()
    log = router.server.router.request_log
    assert log is not None and len(log.newest(None)) == MAX_REQUESTS
    seen: list[str] = []
    target = "/ui/requests"
    while target:
        text = (await router.client.get(target)).text
        seen += re.findall("<summary>[0-9: UTC-]+<code>(.*?)</code>", text)
        assert text.count("<details>") <= REQUESTS_ON_PAGE
        older = re.search('href="([^"]*)">Older', text)
        target = older[1] if older else ""
    assert seen == [record.id for record in log.newest(None)]
    for query in ("page=0", "page=x", "page=%C2%B2", "page=99999", "page=-1", "page"):
        assert seen[0] in (await router.client.get(f"/ui/requests?{query}")).text
    assert "<details>" not in (await router.client.get("/ui/requests?page=99")).text


async def test_a_busy_tenant_and_strangers_push_out_no_requests_of_others(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path, console=True)
    log = router.server.router.request_log
    assert log is not None
    await ask(router, BORIS)
    for _ in range(3):
        assert (await ask(router, "fl-wrong")).status_code == 401
    assert len(log.newest(None)) == 1
    assert (await ask(router, ANNA)).status_code == 200
    for _ in range(MAX_REQUESTS + 5):
        await ask(router, ANNA)
    assert len(log.newest("boris")) == 1 and len(log.newest(None)) == MAX_REQUESTS
