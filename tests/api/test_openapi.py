"""The OpenAPI document: the same from worker and router, and right requests are right by it."""

import httpx
import jsonschema
import pytest
from tests.api.fleet import Pair
from tests.api.fuzz import GOOD


def test_worker_and_router_serve_it(pair: Pair) -> None:
    worker, router = (httpx.get(f"{url}/openapi.json") for url in pair.urls)
    assert worker.status_code == router.status_code == 200
    assert worker.json() == router.json()
    assert worker.json()["openapi"].startswith("3.1")


@pytest.mark.parametrize(
    ("path", "body", "right"),
    [
        *((path, body, True) for path, body in GOOD),
        ("/v1/completions", {"prompt": "x", "n": 0}, False),
        ("/v1/completions", {"n": 1}, False),
        ("/v1/chat/completions", {"messages": [], "store": True}, False),
        ("/v1/chat/completions", {"messages": [], "store": None, "stream_options": {"include_usage": True}}, True),
    ],
)
def test_what_is_right_by_it(pair: Pair, path: str, body: dict, right: bool) -> None:
    document = pair.worker.client.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    assert validator.is_valid(body) is right
