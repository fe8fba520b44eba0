"""The OpenAPI document: the same from worker and router, complete; valid requests and real answers conform to it."""

import json
import re

import httpx
import jsonschema
import pytest
from tests.api.documented import check, schema_of
from tests.api.fleet import Pair
from tests.api.fuzz import GOOD

from fairlead_common.protocols.paths import CHAT, COMPLETIONS, COMPUTED, EMBEDDINGS, RERANKS, SCORES, TOKENIZED

METHODS = {"get", "post"}
WORKER_ONLY = (
    "/internal",
    "/load",
    "/version",
    "/invocations",
    "/livez",
    "/ping",
    "/reset_prefix_cache",
    "/server_info",
    "/tokenizer_info",
)
WITHOUT_BODY = {"/v1/responses/{id}/cancel", "/ping", "/reset_prefix_cache"}
"""The path says all."""
INVOKED = {CHAT, COMPLETIONS, EMBEDDINGS, *RERANKS, *SCORES}
"""The APIs behind `/invocations`."""


@pytest.fixture(scope="module")
def document(pair: Pair) -> dict:
    return pair.worker.client.get("/openapi.json").json()


def test_worker_and_router_serve_the_same_document(pair: Pair) -> None:
    worker, router = (httpx.get(f"{url}/openapi.json") for url in pair.urls)
    assert worker.status_code == router.status_code == 200
    assert worker.json() == router.json()
    assert worker.json()["openapi"].startswith("3.1")


def test_worker_and_router_serve_a_page_that_loads_nothing_from_elsewhere(pair: Pair, document: dict) -> None:
    worker, router = (httpx.get(f"{url}/docs") for url in pair.urls)
    assert worker.status_code == router.status_code == 200 and worker.headers["content-type"].startswith("text/html")
    assert worker.text == router.text
    assert not re.search(r"<script|<link|<img|src=|https?://", worker.text)
    ids = set(re.findall(r'id="([^"]+)"', worker.text))
    assert ids == {each["operationId"] for each in operations(document)} | document["components"]["schemas"].keys()
    assert {name.removeprefix("#") for name in re.findall(r'href="(#[^"]+)"', worker.text)} <= ids, "every link leads somewhere"


def test_every_operation_says_what_it_takes_and_returns(document: dict) -> None:
    every = operations(document)
    assert len({each["operationId"] for each in every}) == len(every)
    for each in every:
        assert each["tags"] and each["summary"], each
        good = {status: said for status, said in each["responses"].items() if status.startswith("2")}
        assert len(good) == 1 and next(iter(good.values()))["content"], each
        assert "application/json" in each["responses"]["default"]["content"]
        if "requestBody" in each:
            assert each["responses"].keys() >= {"400", "413", "500", "503"}, each["operationId"]
    streams = {each["operationId"] for each in every if "text/event-stream" in each["responses"].get("200", {}).get("content", {})}
    assert streams == {"create_completion", "create_chat_completion", "create_response", "create_message"}


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_answers_and_events_have_exactly_the_documented_fields(pair: Pair, document: dict, path: str, body: dict) -> None:
    answer = pair.worker.client.post(path, json=body, timeout=60)
    assert answer.status_code == 200
    schema = schema_of(document, path, media="text/event-stream" if body.get("stream") else "application/json")
    for one in iterate_events(answer.text) if body.get("stream") else [answer.text]:
        check(document, schema, json.loads(one))


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/tiny", "/load", "/health", "/livez", "/ping", "/ready", "/version", "/server_info"]
)
def test_pages_have_exactly_the_documented_fields(pair: Pair, document: dict, path: str) -> None:
    pattern = "/v1/models/{name}" if path == "/v1/models/tiny" else path
    answer = pair.worker.client.get(path)
    assert answer.status_code == 200
    check(document, schema_of(document, pattern, "get"), answer.json())
    assert pair.worker.client.head(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/tokenize", "/detokenize", "/score"])
def test_errors_have_exactly_the_documented_fields(pair: Pair, document: dict, path: str) -> None:
    answer = pair.worker.client.post(path, json={"model": 5})
    assert answer.status_code == 400
    check(document, schema_of(document, path, status="400"), answer.json())


def test_other_forms_of_answers_have_exactly_the_documented_fields(pair: Pair, document: dict) -> None:
    client, claude = pair.worker.client, {"anthropic-version": "2023-06-01"}
    for kind, answer in (
        ("AnthropicModel", client.get("/v1/models/tiny", headers=claude)),
        ("AnthropicModelList", client.get("/v1/models", headers=claude)),
        ("PooledList", client.post("/pooling", json={"input": ["a", "b"]})),
        ("DroppedPages", client.post("/reset_prefix_cache")),
        ("TokenizerInfo", client.get("/tokenizer_info")),
    ):
        check(document, kind, answer.json(), ignored=("TokenizerInfo",))


def iterate_events(stream: str) -> list[str]:
    return [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]


def operations(document: dict) -> list[dict]:
    return [operation for said in document["paths"].values() for operation in said.values()]


def test_every_body_has_a_schema(document: dict) -> None:
    posts = {path: said["post"] for path, said in document["paths"].items() if "post" in said and path not in WITHOUT_BODY}
    assert {*COMPUTED, *TOKENIZED} <= posts.keys(), "paths that a router forwards are in it too"
    for path, post in posts.items():
        body = post["requestBody"]["content"]["application/json"]["schema"]
        assert ("anyOf" in body) == (path == "/invocations"), "only this path has the body of any API"
        for each in body.get("anyOf", [body]):
            assert document["components"]["schemas"][each["$ref"].rpartition("/")[2]]["properties"], path


def test_the_document_has_exactly_the_existing_paths(pair: Pair, document: dict) -> None:
    for path, said in document["paths"].items():
        for url in pair.urls:
            if "lora" not in path and "{" not in path and not path.startswith(WORKER_ONLY):
                # An empty body is no valid request: an existing path says so.
                answers = {method: httpx.request(method, url + path, content=b"").status_code for method in METHODS & said.keys()}
                assert not {404, 405} & {*answers.values()}, (url, path, answers)


@pytest.mark.parametrize(
    ("path", "body", "right"),
    [
        *((path, body, True) for path, body in GOOD),
        ("/v1/completions", {"prompt": "x", "n": 0}, False),
        ("/v1/completions", {"n": 1}, False),
        ("/v1/chat/completions", {"messages": [], "store": True}, True),
        ("/v1/chat/completions", {"messages": [], "thinking_token_budget": -2}, False),
        ("/v1/chat/completions", {"messages": [], "store": None, "stream_options": {"include_usage": True}}, True),
        ("/v1/responses", {"input": "x", "store": False, "top_k": 5}, True),
        ("/v1/responses", {"input": "x", "store": True}, True),
        ("/v1/responses", {"input": "x", "background": True}, False),
        ("/v1/responses", {"input": "x", "top_k": -7}, False),
        ("/v1/responses", {"input": "x", "truncation": "auto"}, True),
        ("/v1/responses", {"input": "x", "truncation": "first"}, False),
        ("/v1/messages", {"messages": []}, False),
        ("/v1/messages/count_tokens", {"messages": []}, True),
        ("/v1/rerank", {"query": "x"}, False),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 5}, True),
        ("/v1/embeddings", {"input": "x", "embed_dtype": "int8"}, False),
        *(("/invocations", body, True) for path, body in GOOD if path in INVOKED),
        ("/invocations", {"data_1": "x", "items": ["y"]}, True),
        ("/invocations", {"prompt": "x", "n": 0}, False),
        ("/invocations", {"query": "x"}, False),
        ("/invocations", {"text_1": "x"}, False),
        ("/invocations", {}, False),
    ],
)
def test_the_schema_accepts_valid_bodies_only(document: dict, path: str, body: dict, right: bool) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    assert validator.is_valid(body) is right
