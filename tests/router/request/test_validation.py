"""Without a worker: requests that every worker would refuse get a 400 and cause no scale-up; the others wait for a worker."""

import json
from time import monotonic
from typing import Any

import pytest
from tests.router.harness import Fleet, RunningRouter
from tests.router.stand_in_worker import Exchange

from fairlead_common.protocols.paths import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES

TURN = [{"role": "user", "content": "hello"}]
WRONG: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, {"prompt": {"text": "x"}}, "prompt", "got `object`"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "7"}, "max_tokens", "got `str`"),
    (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream", "got `str`"),
    (COMPLETIONS, {"model": "stand-in"}, "prompt", "is missing"),
    (CHAT, {"messages": "hello"}, "messages", "got `str`"),
    (CHAT, {"messages": ["hello"]}, "messages[0]", "got `str`"),
    (CHAT, {"messages": TURN, "model": 5}, "model", "got `int`"),
    (CHAT, {}, "messages", "is missing"),
    (RESPONSES, {"input": TURN, "background": True}, "background", "not supported"),
    (RESPONSES, {"input": 5}, "input", ""),
    (EMBEDDINGS, {"input": {"text": "x"}}, "input", "got `object`"),
    (EMBEDDINGS, {"model": "stand-in"}, "input", "is missing"),
]
BROKEN = (b"", b"{", b"[1]", b'"text"', b'{"x": ' + b"[" * 100_000, b'{"prompt": "\xff"}')
HELD: list[tuple[str, Any]] = [
    (COMPLETIONS, {"prompt": "x " * 500_000, "model": "nobody-knows", "max_tokens": 2**31}),
    (COMPLETIONS, {"prompt": "x", "n": 5000, "no_such_field": {}}),
    (CHAT, {"messages": [{"role": "nobody"}], "prompt": 5}),
    (MESSAGES, {"messages": TURN}),
    (COUNT_TOKENS, {"messages": TURN}),
    ("/tokenize", {"prompt": 5}),
]


async def empty(fleet: Fleet) -> RunningRouter:
    return await fleet.router(ready=0, workers=fleet.list_in_file(), hold_timeout=0.2)


async def test_a_request_that_no_worker_would_accept_is_refused_immediately(fleet: Fleet) -> None:
    router = await empty(fleet)
    began = monotonic()
    for path, body, param, words in WRONG:
        answer = await router.client.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and words in error["message"], (path, body, error)
    for path in (COMPLETIONS, CHAT, RESPONSES, EMBEDDINGS, "/tokenize", "/detokenize"):
        for body in BROKEN:
            answer = await router.client.post(path, content=body)
            assert answer.status_code == 400, (path, body[:20])
    for path in (MESSAGES, COUNT_TOKENS):  # in Anthropic's form
        for fields in ({"temperature": "hot"}, {"messages": []}, {"tools": [{"type": "custom"}]}):
            answer = await router.client.post(path, json={"messages": TURN, "max_tokens": 1} | fields)
            (field,) = fields
            assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(field), answer.text
    demand = json.loads((await router.client.get("/fairlead/demand")).text)
    assert demand["requests_per_second"] == 0 and demand["idle_seconds"] >= round(monotonic() - began, 1) - 0.1, (
        "it does not count as demand"
    )


@pytest.mark.parametrize(("path", "body"), HELD, ids=[path for path, _ in HELD])
async def test_a_request_that_only_a_worker_can_judge_waits_for_one(fleet: Fleet, path: str, body: Any) -> None:
    answer = await (await empty(fleet)).client.post(path, json=body)
    assert answer.status_code == 503 and "No worker became ready" in answer.text


async def test_a_worker_judges_the_request_where_there_is_one(fleet: Fleet) -> None:
    async def refuses(exchange: Exchange) -> None:
        await exchange.whole(400, {"error": {"message": "in the worker's words"}})

    router = await fleet.router(await fleet.worker(behaviour=refuses))
    for path, body, _, _ in WRONG:
        assert "the worker's words" in (await router.client.post(path, json=body)).text
