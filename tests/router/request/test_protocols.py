"""Responses and Messages through the router: tokenized as chats, with errors and events in the form of their API."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.router.harness import Fleet
from tests.router.stand_in_worker import Exchange
from tests.router.tenancy.test_access import ANNA, BORIS, key_file

from fairlead_common.prompts.encoder import PromptEncoder

TURN = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "stand-in", "instructions": "Be brief.", "input": TURN, "max_output_tokens": 7},
    "/v1/messages": {"model": "stand-in", "system": "Be brief.", "messages": TURN, "max_tokens": 7},
}
TEXT = "<system>Be brief.\n<user>hello\n<assistant>"
both = pytest.mark.parametrize("path", BODIES)


def events(text: str) -> list[tuple[str, Any]]:
    """Return (name, data) of each event; a comment is ("", text)."""
    found = []
    for block in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((lines.get("event", ""), json.loads(lines["data"]) if "data" in lines else block))
    return found


@both
async def test_a_worker_gets_the_chats_tokens_and_the_clients_own_body(fleet: Fleet, path: str) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    assert (await router.client.post(path, json=BODIES[path])).status_code == 200
    (received,) = worker.received
    assert received.path == path and received.json == BODIES[path]
    assert received.tokens is not None and PromptEncoder(worker.format).decode(received.tokens) == TEXT
    text = (await router.server.router.metrics.render()).decode()
    assert f'fairlead_router_requests_total{{code="200",path="{path}"}} 1.0' in text


@both
async def test_a_body_that_is_no_chat_is_refused_by_the_worker(fleet: Fleet, path: str) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    for wrong in ({"tools": [{"type": "custom"}]}, {"temperature": "hot"}, {"messages": 5, "input": 5}):
        await router.client.post(path, json=BODIES[path] | wrong)
        assert worker.received[-1].tokens is None and worker.received[-1].json == BODIES[path] | wrong


async def test_count_tokens_is_answered_by_a_worker(fleet: Fleet) -> None:
    async def counts(exchange: Exchange) -> None:
        await exchange.whole(200, {"input_tokens": 3})

    worker = await fleet.worker(behaviour=counts)
    router = await fleet.router(worker)
    answer = await router.client.post("/v1/messages/count_tokens", json=BODIES["/v1/messages"])
    assert answer.json() == {"input_tokens": 3}


@both
async def test_a_held_stream_gets_keepalives_and_an_error_in_its_own_form(fleet: Fleet, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.serving.admission.KEEP_ALIVE_SECONDS", 0.05)
    router = await fleet.router(ready=0, workers=fleet.list_in_file(), hold_timeout=0.4)
    answer = await router.client.post(path, json=BODIES[path] | {"stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    *signs, (name, error) = events(answer.text)
    assert set(map(str, signs)) == {str(("ping", {"type": "ping"}) if path == "/v1/messages" else ("", ": held"))}
    assert name == "error" == error["type"]
    if path == "/v1/messages":
        assert error["error"]["type"] == "overloaded_error" and error["error"]["message"]
    else:
        assert error["code"] == "service_unavailable" and error["message"] and error["sequence_number"] == 0


@both
async def test_a_stream_whose_worker_is_lost_ends_with_an_error_in_its_own_form(fleet: Fleet, path: str) -> None:
    async def breaks_off(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.chunk(b'event: ping\ndata: {"type": "ping"}\n\n')
        await asyncio.sleep(0)
        exchange.die()

    router = await fleet.router(await fleet.worker(behaviour=breaks_off))
    answer = await router.client.post(path, json=BODIES[path] | {"stream": True})
    name, error = events(answer.text)[-1]
    assert name == "error" == error["type"]
    assert "lost" in (error["error"]["message"] if path == "/v1/messages" else error["message"])


async def test_router_errors_have_anthropics_form_for_its_clients(fleet: Fleet, tmp_path: Any) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file())
    router = await fleet.router(await fleet.worker(), api_keys_file=str(path))

    async def refused(key: str, **fields: Any) -> tuple[int, str]:
        answer = await router.client.post("/v1/messages", json=BODIES["/v1/messages"] | fields, headers={"x-api-key": key})
        return answer.status_code, answer.json()["error"]["type"] if answer.status_code >= 400 else ""

    assert await refused("wrong") == (401, "authentication_error")
    assert await refused(ANNA, model="another") == (404, "not_found_error")
    assert await refused(ANNA) == (200, "")
    assert (await router.client.get("/v1/messages", headers={"x-api-key": ANNA})).json()["type"] == "error"


async def test_tokenize_requests_are_salted_per_tenant(fleet: Fleet, tmp_path: Path) -> None:
    """A worker caches the tokens of long texts: its response time must not tell one tenant what another has sent."""
    path = tmp_path / "keys.json"
    path.write_text(key_file())
    router = await fleet.router(worker := await fleet.worker(), api_keys_file=str(path))
    for key in (ANNA, BORIS):
        for where, body in (("/v1/messages", BODIES["/v1/messages"]), ("/v1/messages/count_tokens", {}), ("/tokenize", {})):
            await router.client.post(where, json=body, headers={"x-api-key": key})
    salts = [received.headers.get("x-fairlead-cache-salt") for received in worker.received]
    assert salts == [salts[0]] * 3 + [salts[3]] * 3 and salts[0] and salts[3] and salts[0] != salts[3]
