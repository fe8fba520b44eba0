"""Authentication: keys from a file that changes, tenants that cannot be forged, and no secrets in the logs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.admin_paths import ROUTER as ADMIN_PATHS
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.stand_in_worker import Exchange, StandIn, answers

from fairlead_common.response_keys import derive_keys, parse
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.salts import cache_salt
from fairlead_router.serving.admission import AHEAD_REQUESTS
from fairlead_router.tenancy.tenants import KeyFileError, read_keys

SECRET = "a secret for salts of at least 32 characters"
ANNA, BORIS = "fl-anna-key-which-is-random-in-life", "fl-boris-key-which-is-random-in-life"


def key_file(tenants: dict[str, dict[str, Any]] | None = None) -> str:
    """Return a key file with tenants anna and boris, each with one key."""
    found: dict[str, dict[str, Any]] = {"anna": {}, "boris": {}} if tenants is None else tenants
    for (name, said), key in zip(found.items(), (ANNA, BORIS), strict=False):
        said.setdefault("keys", [{"name": f"{name}-1", "sha256": sha256(key.encode()).hexdigest()}])
    return yaml.safe_dump({"saltSecret": SECRET, "tenants": found})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def guarded(
    fleet: Fleet, tmp_path: Path, tenants: dict[str, dict[str, Any]] | None = None, **settings: Any
) -> tuple[RunningRouter, StandIn]:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file(tenants))
    worker = await fleet.worker()
    return await fleet.router(worker, api_keys_file=str(path), **settings), worker


async def ask(router: RunningRouter, key: str, prompt: str = "hello there", **fields: Any) -> Any:
    return await router.client.post("/v1/completions", json={"prompt": prompt, **fields}, headers=bearer(key))


async def test_stored_responses_are_asked_for_in_the_name_of_the_keys_tenant(fleet: Fleet, tmp_path: Path) -> None:
    async def stored(exchange: Exchange) -> None:
        await exchange.whole(200, {"object": "response"})

    (tmp_path / "responses").write_text(SECRET)
    router, worker = await guarded(fleet, tmp_path, responses_secret_file=str(tmp_path / "responses"))
    worker.behaviour = stored
    id = "resp_" + "0a" * 16
    annas = derive_keys(SECRET.encode(), "anna", id).encode().decode()
    forged = bearer(BORIS) | {"x-fairlead-tenant": "anna", "x-fairlead-response-keys": annas}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        target = f"/v1/responses/{id}{path}"
        assert (await router.client.request(method, target)).status_code == 401
        worker.received.clear()
        await router.client.request(method, target, headers=forged)
        (received,) = worker.received
        assert (received.path, dict(received.headers)["x-fairlead-tenant"]) == (target, "boris")
        assert parse(received.headers["x-fairlead-response-keys"].encode()) == derive_keys(SECRET.encode(), "boris", id)
    worker.received.clear()
    for target in (f"/v1/responses/{id}//", "/v1/responses/resp_5%2F..", f"/v1/responses/{id}/x"):
        answer = await router.client.get(target, headers=bearer(ANNA))
        assert answer.status_code in (404, 405), target
    assert (await router.client.put(f"/v1/responses/{id}", headers=bearer(ANNA))).status_code == 405
    assert not worker.received


async def test_a_worker_gets_the_keys_of_its_requests_responses_and_no_others(fleet: Fleet, tmp_path: Path) -> None:
    """Another router, or the same one after a restart, derives the same keys. Another secret, or tenant, derives others."""

    async def done(exchange: Exchange) -> None:
        await exchange.whole(200, {"object": "response"})

    file, previous = tmp_path / "responses", "resp_" + "0a" * 16
    file.write_text(SECRET)
    first, worker = await guarded(fleet, tmp_path, responses_secret_file=str(file))
    second = await fleet.router(worker, api_keys_file=str(tmp_path / "keys.yaml"), responses_secret_file=str(file))
    worker.behaviour = done

    async def keys(router: RunningRouter, key: str, **fields: Any) -> dict[str, bytes]:
        worker.received.clear()
        await router.client.post("/v1/responses", json={"input": "hello", **fields}, headers=bearer(key))
        return dict(parse(worker.received[0].headers["x-fairlead-response-keys"].encode()).keys)

    seen = [await keys(router, ANNA, previous_response_id=previous) for router in (first, second)]
    new = {id for each in seen for id in each} - {previous}
    assert seen[0][previous] == seen[1][previous] == derive_keys(SECRET.encode(), "anna", previous).keys[previous]
    assert len(new) == 2 and all(len(each) == 2 for each in seen), "each new response has its own id"
    assert (await keys(first, BORIS, previous_response_id=previous))[previous] != seen[0][previous]
    for other in ({}, {"previous_response_id": "resp_x"}, {"previous_response_id": ["x"]}, {"previous_response_id": previous + "a"}):
        assert len(await keys(first, ANNA, **other)) == 1
    await first.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, headers=bearer(ANNA))
    assert "x-fairlead-response-keys" not in worker.received[-1].headers
    file.write_text("another secret for stored responses")
    rotated = (await keys(first, ANNA, previous_response_id=previous))[previous]
    assert rotated != seen[0][previous]
    for unusable in ("short", ""):
        file.write_text(unusable)
        assert (await keys(first, ANNA, previous_response_id=previous))[previous] == rotated, "the last usable one stays"


async def test_a_missing_key_is_refused_in_openais_words(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path)
    for headers in ({}, bearer("fl-wrong"), {"authorization": ANNA}, {"authorization": f"Basic {ANNA}"}, {"x-api-key": "no"}):
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/stand-in"),
        ):
            answer = await router.client.request(method, path, json={"prompt": "x"}, headers=headers)
            error = answer.json()["error"]
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error" and "wrong" not in error["message"]
    assert (await router.client.post(f"/v1/completions?api_key={ANNA}", json={"prompt": "x"})).status_code == 401
    assert not worker.received
    for headers in (bearer(ANNA), {"Authorization": f"bearer {BORIS}"}, {"x-api-key": ANNA}):
        assert (await router.client.post("/v1/completions?key=k", json={"prompt": "x"}, headers=headers)).status_code == 200
        assert (await router.client.get("/v1/models", headers=headers)).json()["data"]
    seen = worker.received[-1]
    assert seen.path == "/v1/completions", "no query string: it may hold a key"
    assert not {"authorization", "x-api-key"} & seen.headers.keys()
    assert (await router.client.get("/health")).status_code == (await router.client.get("/ready")).status_code == 200


ADMIN_METHODS = [(path, "POST" if path == "/fairlead/score" else "GET") for path in ADMIN_PATHS]


async def test_on_the_clients_port_admin_paths_need_a_key_and_take_no_report_of_a_tenant(fleet: Fleet, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    router, _ = await guarded(fleet, tmp_path, batch_secret_file=str(secret))
    for path, method in ADMIN_METHODS:
        for headers, status in (({}, 401), (bearer("fl-wrong"), 401), (bearer(ANNA), 200), (bearer(secret.read_text()), 200)):
            answer = await router.client.request(method, path, json={"model": "stand-in", "prompt": "x"}, headers=headers)
            assert answer.status_code == status, (path, headers)
    report = "/fairlead/demand?wanted=2&starting=1&advancing=1"
    for headers, status in (({}, 401), (bearer(ANNA), 403)):
        assert (await router.client.post(report, headers=headers)).status_code == status
    assert (await router.client.get(report, headers=bearer(secret.read_text()))).status_code == 200
    assert not router.server.router.scale_up.is_advancing, "no GET and no tenant reports"
    assert (await router.client.post(report, headers=bearer(secret.read_text()))).status_code == 200
    assert router.server.router.scale_up.is_advancing


async def test_the_admin_port_asks_for_no_key(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path, admin_port=0)
    for path, method in ADMIN_METHODS:
        assert (await router.client.request(method, path, headers=bearer(ANNA))).status_code == 404, path
        url = f"http://127.0.0.1:{router.server.admin_port}{path}"
        assert (await router.client.request(method, url, json={"model": "stand-in", "prompt": "x"})).status_code == 200, path


async def test_the_key_determines_the_tenant_whatever_the_request_says(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path, {"anna": {"priority": -5}, "boris": {"salt": "shared"}})
    forged = {
        "X-Fairlead-Tenant": "anna",
        "x-fairlead-cache-salt": cache_salt(SECRET.encode(), "tenant:anna"),
        "X-Fairlead-Priority": "-99",
        "X-FAIRLEAD-PROMPT-TOKENS": "0",
        "Connection": "x-fairlead-tenant, x-session-id",
    }
    body = {"prompt": "hello there " * 10, "user": "anna", "priority": -99, "cache_salt": "mine"}
    assert (await router.client.post("/v1/completions", json=body, headers=bearer(BORIS) | forged)).status_code == 200
    seen = worker.received[-1]
    salt = cache_salt(SECRET.encode(), "salt:shared", "mine")
    assert seen.headers["x-fairlead-tenant"] == "boris" and seen.headers["x-fairlead-priority"] == "0"
    assert seen.headers["x-fairlead-cache-salt"] == salt and seen.headers["x-fairlead-prompt-tokens"] == str(len(seen.tokens or []))
    for asked, said in ((-99, "-5"), (-5, "-5"), (3, "3"), (10**6, "1000")):
        assert (await ask(router, ANNA, priority=asked)).status_code == 200
        assert worker.received[-1].headers["x-fairlead-priority"] == said
    assert (await ask(router, ANNA)).status_code == 200
    assert worker.received[-1].headers["x-fairlead-priority"] == "-5"


async def test_tenants_hash_their_prompts_apart(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path)
    prompts = router.server.router.prompts
    hashes = {}
    for key in (ANNA, BORIS):
        caller = router.server.router.handler.keys.authenticate(key.encode())
        hashes[key] = list((await prompts.read("/v1/completions", b'{"prompt": "%b"}' % (b"tell me more " * 20), caller)).hashes)
    plain = await prompts.read("/v1/completions", b'{"prompt": "%b"}' % (b"tell me more " * 20))
    assert not set(hashes[ANNA]) & set(hashes[BORIS]) and not set(plain.hashes) & set(hashes[ANNA] + hashes[BORIS])
    root = prompt_root(worker.format, salt=cache_salt(SECRET.encode(), "tenant:anna"))
    assert hashes[ANNA] == list(block_hashes(root, plain.tokens, worker.format.block_tokens)), "as the worker hashes them"


async def test_a_changed_key_file_is_loaded_and_a_broken_one_is_not(fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file changes as the kubelet does it: `keys.yaml -> ..data/keys.yaml`, and `..data` is swapped."""
    secret = tmp_path / "secret"
    secret.mkdir()

    def swap(version: str, text: str) -> None:
        (secret / version).mkdir()
        (secret / version / "keys.yaml").write_text(text)
        (secret / "fresh").symlink_to(version)
        (secret / "fresh").replace(secret / "..data")

    swap("v1", key_file({"anna": {}}))
    (secret / "keys.yaml").symlink_to("..data/keys.yaml")
    router = await fleet.router(await fleet.worker(), api_keys_file=str(secret / "keys.yaml"))

    def answers(key: str, status: int) -> Callable[[], Awaitable[bool]]:
        async def holds() -> bool:
            return (await ask(router, key)).status_code == status

        return holds

    assert await answers(ANNA, 200)() and await answers(BORIS, 401)()
    swap("v2", key_file())
    await eventually(answers(BORIS, 200), "the new key is known")
    swap("v3", key_file() + f"\n  broken: [{BORIS}\n")
    await eventually(lambda: bool(router.server.router.handler.keys.problem), "the broken file was seen")
    assert await answers(ANNA, 200)() and await answers(BORIS, 200)()
    assert await router.metric("fairlead_router_key_file_ok") == 0
    assert "stays in use" in caplog.text and BORIS not in caplog.text, "a broken file is not quoted"
    swap("v4", "a: !!timestamp x")  # PyYAML's own constructor raises AttributeError for this one
    await eventually(lambda: "AttributeError" in router.server.router.handler.keys.problem, "so was one that its reader stumbles over")
    swap("v5", key_file({"anna": {"keys": []}, "boris": {}}))
    await eventually(answers(ANNA, 401), "a key that was taken out ends")
    assert await router.metric("fairlead_router_key_file_ok") == 1


async def test_without_a_usable_key_file_all_requests_are_refused_until_it_is_repaired(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    router = await fleet.router(await fleet.worker(), api_keys_file=str(path))
    answer = await ask(router, ANNA)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    ready = await router.client.get("/ready")
    assert ready.status_code == 503 and "No such file" in ready.json()["reason"]
    path.write_text(key_file())

    async def served() -> bool:
        return (await ask(router, ANNA)).status_code == 200

    await eventually(served, "the file is read")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"saltSecret": "short"}, "saltSecret"),
        ({"tenants": {"no spaces": {"keys": []}}}, "tenants"),
        ({"tenants": {"a": {"keys": [{"sha256": "abc"}]}}}, "sha256"),
        ({"tenants": {"a": {"keys": [], "tokensPerMinute": 0}}}, "tokensPerMinute"),
        ({"tenants": {"a": {"keys": [], "colour": "red"}}}, "colour"),
        ({"tenants": {"a": {"keys": [{"sha256": "a" * 64}]}, "b": {"keys": [{"sha256": "a" * 64}]}}}, "tenant b is key"),
    ],
)
def test_an_invalid_key_file_is_refused_with_the_field_named(change: dict[str, Any], where: str) -> None:
    with pytest.raises(KeyFileError, match=where):
        read_keys(yaml.safe_dump({"saltSecret": SECRET, "tenants": {}} | change).encode())


async def test_nothing_confidential_is_logged_at_any_level(fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("fairlead_router").setLevel(logging.DEBUG)
    router, worker = await guarded(fleet, tmp_path, {"anna": {"tokensPerMinute": 10_000}, "boris": {}}, hold_timeout=0.3)
    prompt, tokens = "xyzzy-prompt-secret " * 20, [7, 11, 4000123456, 17]
    for key in (ANNA, "fl-wrong-key-secret"):
        for fields in ({}, {"stream": True}, {"n": 2}, {"user": "user-secret", "cache_salt": "salt-secret"}):
            await ask(router, key, prompt, **fields)
        await router.client.post("/v1/completions", json={"prompt": tokens}, headers=bearer(key))
        await router.client.post(
            f"/v1/chat/completions?api_key={key}", json={"messages": [{"role": "user", "content": prompt}]}, headers=bearer(key)
        )
        await router.client.post("/v1/completions", content=b'{"prompt": "xyzzy-prompt-secret', headers=bearer(key))
        await router.client.post(f"/{key}", json={"prompt": prompt}, headers=bearer(key))
        await router.client.post("/v1/completions", json={"prompt": prompt}, headers=bearer(key) | {"x-request-id": "forged\tline secret"})
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(
        b"POST /v1/completions?xyzzy-prompt-secret HTTP/1.1\r\nAuthorization: Bearer " + ANNA.encode() + b"\r\nbroken header\r\n\r\n"
    )
    assert b" 400 " in await reader.readline()
    writer.close()
    worker.ready = False
    await worker.kill()
    await ask(router, BORIS, prompt, max_tokens=1)
    router.server._app.close()
    said = "\n".join(
        f"{record.name} {record.getMessage()} {record.exc_text or ''}" for record in caplog.records if not record.name.startswith("http")
    )
    assert "caller=anna/anna-1" in said, "the log names the tenant"
    salt = cache_salt(SECRET.encode(), "tenant:anna")
    for secret in ("xyzzy", "secret", ANNA, BORIS, sha256(ANNA.encode()).hexdigest(), SECRET, salt, "4000123456"):
        assert secret not in said, secret
    pages = [await router.client.get(path, headers=bearer(ANNA)) for path in ("/metrics", "/fairlead/workers")]
    text = "".join(page.text for page in pages)
    assert ANNA not in text and "xyzzy" not in text


async def test_tokenize_requests_count_against_quota_and_wait_in_the_queue(fleet: Fleet, tmp_path: Path) -> None:
    """Tokenizing costs a worker's CPU as a prompt does: a tenant cannot have more of it than of prompts, nor overtake them."""
    router, worker = await guarded(fleet, tmp_path, {"anna": {"tokensPerMinute": 6, "burstTokens": 1000}, "boris": {}})
    text = {"prompt": "word " * 1000}
    answered = await router.client.post("/tokenize", json=text, headers=bearer(ANNA))
    assert answered.status_code == 200 and answered.headers["x-ratelimit-limit-tokens"] == "1000"
    for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/completions"):
        refused = await router.client.post(path, json=text, headers=bearer(ANNA))
        assert refused.status_code == 429, path
    asked, gate = len(worker.received), asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await gate.wait()
        await answers(exchange)

    worker.behaviour = waits
    tasks = [asyncio.create_task(router.client.post("/tokenize", json={"prompt": "x" * 32_000}, headers=bearer(BORIS))) for _ in range(20)]
    await eventually(lambda: len(worker.received) - asked >= AHEAD_REQUESTS, "as many as a worker is given ahead are there")
    assert (await router.client.get("/health")).status_code == 200
    assert len(worker.received) - asked < 20 and router.server.router.admission.queued()[0] > 0
    gate.set()
    assert {(await task).status_code for task in tasks} == {200}
