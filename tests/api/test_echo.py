"""An error repeats at most 200 characters of what the client sent, wherever they were in the request, in worker and router."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.api.bodies import HI
from tests.api.fleet import Pair

LETTER = "Q"
LONG = LETTER * 5_000
MOST, MOST_BYTES = 200, 2048
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/embeddings": {"input": "x"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/query": {"model": "tiny", "token_ids": [1]},
}
TEMPLATE = "{{ raise_exception(messages) }}"
NESTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "x"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", LONG: LONG}], "chat_template": TEMPLATE}),
    ("/v1/chat/completions", {"messages": HI, "tools": [TOOL, {"type": LONG}]}),
    ("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function", "function": {"name": LONG}}]}),
    ("/v1/chat/completions", {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": LONG}}}),
    ("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": LONG}}}}),
    ("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": LONG}}}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {LONG: LONG}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(" + LONG}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": "root ::= " + LONG}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"structural_tag": LONG}}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"9" * 5_000: 1}}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 1, "5" + LONG: 1}}),
    ("/v1/responses", {"input": [{"type": LONG}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/responses", {"input": "x", "tools": [{"type": LONG}]}),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": LONG}}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": LONG}]}], "max_tokens": 1}),
    ("/v1/messages", {"messages": HI, "max_tokens": 1, "thinking": {"type": LONG}}),
    ("/query", {"model": LONG, "token_ids": [1]}),
    ("/query", {"model": "tiny", "tenant_id": LONG, "token_ids": [1]}),
]
PATHS = (
    f"/{LONG}",
    f"/v1/models/{LONG}",
    f"/v1/completions/{LONG}",
    f"/internal/hot-prefixes/{LONG}",
    f"/fairlead/demand?wait={LONG}",
    f"/fairlead/demand?{LONG}=x",
)
HEADERS = ("x-request-id", "content-encoding", "authorization", "x-fairlead-prompt-tokens", "x-session-id", "expect", LONG[:300])


def fields(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return (path, field) of each body."""
    for path in GOOD:
        if path not in document["paths"]:
            continue
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        while "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        yield from ((path, name) for name in schema["properties"])


def requests(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return (method, path, arguments of httpx) of each request."""
    for path, name in fields(document):
        for value in (LONG, [LONG], {LONG: LONG}, [{"type": LONG, LONG: 1}]):
            yield "POST", path, {"json": GOOD[path] | {name: value}}
    for path, body in NESTED:
        yield "POST", path, {"json": body}
    huge = LETTER * 1_000_000
    for path, body in GOOD.items():
        yield from (("POST", path, {"json": value}) for value in (body | {"model": huge}, huge))
        yield "POST", path, {"content": huge}
    for path in PATHS:
        yield from ((method, path, {}) for method in ("GET", "POST", "DELETE"))
    for name in HEADERS:
        yield from (
            ("POST", "/v1/completions", {"json": GOOD["/v1/completions"], "headers": {name: value}}) for value in (LONG, "9" * 5_000)
        )
    for body in ({"lora_name": LONG, "lora_path": LONG}, {"lora_name": "a", "lora_path": f"file:///{LONG}"}):
        yield "POST", "/v1/load_lora_adapter", {"json": body}
    yield "POST", "/v1/unload_lora_adapter", {"json": {"lora_name": LONG}}


@pytest.mark.parametrize("side", [0, 1], ids=["worker", "router"])
def test_errors_repeat_a_bounded_part_of_the_request(pair: Pair, side: int) -> None:
    found: list[str] = []
    errors = 0
    with httpx.Client(base_url=pair.urls[side], timeout=60) as client:
        for method, path, given in requests(pair.worker.client.get("/openapi.json").json()):
            answer = client.request(method, path, **given)
            if answer.status_code < 400:
                continue
            errors += 1
            repeated = max(answer.text.count(LETTER), answer.text.count("9"))
            if repeated > MOST or len(answer.content) > MOST_BYTES or answer.status_code == 500:
                asked = json.dumps(given)[:80]
                found.append(f"{method} {path[:40]} {asked}: {answer.status_code}, {len(answer.content)} bytes: {answer.text[:200]}")
    assert errors > 200 and not found, "\n".join([f"{len(found)} of {errors}", *found])
