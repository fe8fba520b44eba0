"""The OpenAPI document: the same from worker and router, complete, and valid requests conform to it."""

import httpx
import jsonschema
import pytest
from tests.api.fleet import Pair
from tests.api.fuzz import GOOD

from fairlead_router.app import UNPROMPTED
from fairlead_router.request.prompts import PROMPTED

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
WITHOUT_BODY = {"/internal/withdraw/{attempt}", "/v1/responses/{id}/cancel", "/ping", "/reset_prefix_cache"}
"""The path says all."""


@pytest.fixture(scope="module")
def document(pair: Pair) -> dict:
    return pair.worker.client.get("/openapi.json").json()


def test_worker_and_router_serve_the_same_document(pair: Pair) -> None:
    worker, router = (httpx.get(f"{url}/openapi.json") for url in pair.urls)
    assert worker.status_code == router.status_code == 200
    assert worker.json() == router.json()
    assert worker.json()["openapi"].startswith("3.1")


def test_every_body_has_a_schema(document: dict) -> None:
    other = WITHOUT_BODY | {"/invocations"}  # which has the body of any API
    posts = {path: said["post"] for path, said in document["paths"].items() if "post" in said and path not in other}
    assert {*PROMPTED, *UNPROMPTED} <= posts.keys(), "paths that a router forwards are in it too"
    for path, post in posts.items():
        reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
        assert schema["properties"], path


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
        ("/v1/chat/completions", {"messages": [], "thinking_token_budget": 5}, False),
        ("/v1/chat/completions", {"messages": [], "store": None, "stream_options": {"include_usage": True}}, True),
        ("/v1/responses", {"input": "x", "store": False, "top_k": 5}, True),
        ("/v1/responses", {"input": "x", "store": True}, True),
        ("/v1/responses", {"input": "x", "background": True}, False),
        ("/v1/responses", {"input": "x", "top_k": -7}, False),
        ("/v1/responses", {"input": "x", "truncation": "auto"}, False),
        ("/v1/messages", {"messages": []}, False),
        ("/v1/messages/count_tokens", {"messages": []}, True),
        ("/v1/rerank", {"query": "x"}, False),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 5}, True),
        ("/v1/embeddings", {"input": "x", "embed_dtype": "int8"}, False),
    ],
)
def test_the_schema_accepts_valid_bodies_only(document: dict, path: str, body: dict, right: bool) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    assert validator.is_valid(body) is right
