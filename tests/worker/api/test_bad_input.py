"""Invalid requests get an error that names the field, and the worker continues."""

import gzip
import json
import re
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.common.test_json_size import BOMBS
from tests.worker.api.process import WorkerProcess

from fairlead_common.protocols.paths import COUNT_TOKENS, MESSAGES
from fairlead_worker.api import schema
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.http import INFERENCE

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("completions", {}, 400, "prompt", None),
        ("completions", {"prompt": []}, 400, "prompt", None),
        ("completions", {"prompt": ""}, 400, "prompt", None),
        ("completions", {"prompt": 5}, 400, "prompt", None),
        ("completions", {"prompt": ["a", 1]}, 400, "prompt", None),
        ("completions", {"prompt": [1, -1]}, 400, "prompt[1]", None),
        ("completions", {"prompt": [999999]}, 400, "prompt", None),
        ("completions", {"prompt": "\ud800"}, 400, None, "invalid_json"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", None),
        ("completions", {"prompt": "x", "max_tokens": "7"}, 400, "max_tokens", None),
        ("completions", {"prompt": "x", "temperature": -0.5}, 400, "temperature", None),
        ("completions", {"prompt": "x", "top_p": -0.1}, 400, "top_p", None),
        ("completions", {"prompt": "x", "top_p": 1.1}, 400, "top_p", None),
        ("completions", {"prompt": "x", "top_k": -2}, 400, "top_k", None),
        ("completions", {"prompt": "x", "top_k": 2**63, "top_p": 0.9}, 400, "top_k", None),
        ("completions", {"prompt": "x", "stop_token_ids": [1] * 1025}, 400, "stop_token_ids", None),
        ("completions", {"prompt": "x", "n": 0}, 400, "n", None),
        ("completions", {"prompt": "x", "seed": 2**70}, 400, "seed", None),
        ("completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "stop", None),
        ("completions", {"prompt": "x", "stop": ""}, 400, "stop", None),
        ("completions", {"prompt": "x", "stop": "a" * 257}, 400, "stop", None),
        ("completions", {"prompt": "x", "n": 128, "logprobs": 20, "max_tokens": 4000}, 400, "logprobs", None),
        ("chat/completions", CHAT | {"n": 100, "logprobs": True, "top_logprobs": 20}, 400, "logprobs", None),
        ("completions", {"prompt": "x", "stop": [1]}, 400, "stop[0]", None),
        ("completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs", None),
        ("completions", {"prompt": "x", "stream": "yes"}, 400, "stream", None),
        ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options", None),
        ("completions", {"prompt": "x", "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", None),
        ("completions", {"prompt": "x", "presence_penalty": 2.1}, 400, "presence_penalty", None),
        ("completions", {"prompt": "x", "frequency_penalty": -3}, 400, "frequency_penalty", None),
        ("completions", {"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty", None),
        ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", None),
        ("completions", {"prompt": "x", "logit_bias": {"-1": 1}}, 400, "logit_bias", None),
        ("completions", {"prompt": "x", "logit_bias": {"5": 101}}, 400, "logit_bias", None),
        ("completions", {"prompt": "x", "logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias", None),
        ("completions", {"prompt": "x", "logit_bias": {"99999": 1}}, 400, "logit_bias", None),
        ("completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", None),
        ("completions", {"prompt": "x", "allowed_token_ids": []}, 400, "allowed_token_ids", None),
        ("completions", {"prompt": "x", "allowed_token_ids": [99999]}, 400, "allowed_token_ids", None),
        ("completions", {"prompt": "x", "allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}, 400, "allowed_token_ids", None),
        ("completions", {"prompt": "x", "best_of": 2, "n": 3}, 400, "best_of", None),
        ("completions", {"prompt": "x", "best_of": 4, "stream": True}, 400, "best_of", None),
        ("completions", {"prompt": "x", "best_of": 129}, 400, "best_of", None),
        ("completions", {"prompt": "x", "max_tokens": 0, "logprobs": 1}, 400, "max_tokens", None),
        ("completions", {"prompt": "x", "prompt_logprobs": 21}, 400, "prompt_logprobs", None),
        ("completions", {"prompt": "x", "prompt_logprobs": -1}, 400, "prompt_logprobs", None),
        ("completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", None),
        ("chat/completions", {"messages": [], "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", None),
        ("chat/completions", {"messages": [], "max_tokens": 0}, 400, "max_tokens", None),
        ("completions", {"prompt": "x", "model": "other"}, 404, "model", "model_not_found"),
        ("completions", {"prompt": [5] * 5000}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": "x", "max_tokens": 4096}, 400, "prompt", "context_length_exceeded"),
        ("chat/completions", CHAT | {"max_completion_tokens": 4096}, 400, "messages", "context_length_exceeded"),
        ("responses", {"input": "x", "max_output_tokens": 4096}, 400, "input", "context_length_exceeded"),
        ("chat/completions", {}, 400, "messages", None),
        ("chat/completions", {"messages": []}, 400, "messages", None),
        ("chat/completions", {"messages": "hi"}, 400, "messages", None),
        ("chat/completions", {"messages": [{"content": "no role"}]}, 400, "messages[0].role", None),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", None),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0].type",
            None,
        ),
        ("chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs", None),
        ("chat/completions", CHAT | {"response_format": {"type": "yaml"}}, 400, "response_format.type", None),
        ("chat/completions", CHAT | {"tool_choice": "required"}, 400, "tool_choice", None),
        ("chat/completions", CHAT | {"min_tokens": 2**64}, 400, "min_tokens", None),
        ("chat/completions", CHAT | {"max_completion_tokens": -3}, 400, "max_completion_tokens", None),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else None,
)
def test_wrong_values_are_named(
    shared: WorkerProcess, path: str, body: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    response = shared.client.post(f"/v1/{path}", content=json.dumps(body))
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    if param and "[" not in param and code is None:
        assert param in error["message"]


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-50}, {"min_tokens": 2, "stop_token_ids": [4_000_000_000]}], ids=["temperature", "stop_token_ids"]
)
def test_extreme_values_are_served_and_harm_no_other_request(shared: WorkerProcess, fields: dict[str, Any]) -> None:
    assert shared.complete(prompt="x", max_tokens=4, ignore_eos=True, **fields)["usage"]["completion_tokens"] == 4
    assert shared.complete(prompt="x", max_tokens=1)["object"] == "text_completion"


def test_the_error_for_a_long_prompt_has_both_numbers(shared: WorkerProcess) -> None:
    message = shared.post("/v1/completions", prompt=[5] * 5000).json()["error"]["message"]
    assert "4096" in message
    assert "5000" in message


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("completions", "prompt"),
        ("chat/completions", "messages"),
        ("responses", "input"),
        ("messages", "messages"),
        ("embeddings", "input"),
    ],
)
def test_a_megabyte_of_text_is_refused_before_it_is_tokenized(shared: WorkerProcess, path: str, field: str) -> None:
    text = "some words " * 100_000
    response = shared.post(f"/v1/{path}", **{field: [{"role": "user", "content": text}] if field == "messages" else text}, max_tokens=4)
    error = response.json()["error"]
    assert response.status_code == 400 and "at least" in error["message"] and "4096" in error["message"], error
    assert path == "messages" or (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_a_long_text_is_tokenized_where_that_is_what_is_wanted(shared: WorkerProcess) -> None:
    text = "some words " * 20_000
    counted = shared.post("/tokenize", prompt=text, return_token_strs=False).json()["count"]
    assert counted > 20_000
    body = {"messages": [{"role": "user", "content": text}]}
    assert shared.post("/v1/messages/count_tokens", **body).json()["input_tokens"] > 20_000
    assert shared.complete(prompt=text, truncate_prompt_tokens=9, max_tokens=1)["usage"]["prompt_tokens"] == 9
    chat = shared.post("/v1/chat/completions", **body, truncate_prompt_tokens=9, max_tokens=1)
    assert chat.json()["usage"]["prompt_tokens"] == 9, chat.text


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b'"text"', b"[" * 100_000])
def test_bad_json(shared: WorkerProcess, body: bytes) -> None:
    response = shared.client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", BOMBS)
def test_a_body_with_too_many_nodes_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(schema.msgspec.json, "decode", None)
    with pytest.raises(ApiError, match="the body is too large to decode") as refused:
        schema.parse(BOMBS[kind], schema.ChatRequest)
    assert refused.value.status == 400 and refused.value.code == "request_too_large"


@pytest.mark.parametrize(
    "path", ["completions", "chat/completions", "responses", "messages", "embeddings", "../tokenize", "../invocations"]
)
def test_every_path_bounds_the_nodes_of_a_body(shared: WorkerProcess, path: str) -> None:
    refused = shared.client.post(f"/v1/{path}" if ".." not in path else path[2:], content=BOMBS["lists"])
    assert refused.status_code == 400 and "65536" in refused.json()["error"]["message"], refused.text


def test_the_arguments_of_tool_calls_are_bounded_together(shared: WorkerProcess) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [[]] * 30_000})}}] * 4
    messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "c", "content": "1"}]
    refused = shared.client.post("/v1/chat/completions", json={"messages": messages})
    assert refused.status_code == 400, refused.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"prompt": "! ?" * 1_900_000}),
        ("/v1/completions", {"prompt": "! ?" * 1_900_000, "truncate_prompt_tokens": 10}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "! ?" * 1_900_000}]}),
    ],
)
def test_a_text_of_millions_of_tokens_is_refused_where_the_context_does_not_bound_it(
    shared: WorkerProcess, path: str, fields: dict[str, Any]
) -> None:
    refused = shared.client.post(path, json=fields)
    assert refused.status_code == 400 and "too long" in refused.json()["error"]["message"], refused.text


@pytest.mark.parametrize("number", ["9" * 5000, "1e999"])
def test_an_unrepresentable_number_is_named(shared: WorkerProcess, number: str) -> None:
    for field, named in (("max_tokens", "max_tokens"), ("no_such_field", None)):
        response = shared.client.post("/v1/completions", content=f'{{"prompt": "x", "{field}": {number}}}')
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == named and "out of range" in error["message"], error


@pytest.mark.parametrize(("tokens", "body"), [("3", b"\0" * 8), ("-1", b"{}"), ("x", b"{}"), ("0", b'{"model": null}')])
def test_bad_tokenized_bodies(shared: WorkerProcess, tokens: str, body: bytes) -> None:
    response = shared.client.post("/v1/completions", content=body, headers={"X-Fairlead-Prompt-Tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "head",
    ["HTTP/1.1", "HTTP/1.1\r\nhost: x\r\nhost: y", "HTTP/1.1\r\nhost: x\r\nauthorization: a\r\nauthorization: b", "HTTP/0.9\r\nhost: x"],
)
def test_a_head_that_two_servers_may_read_differently_is_refused(shared: WorkerProcess, head: str) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=30) as connection:
        connection.sendall(f"GET /health {head}\r\n\r\n".encode())
        assert connection.makefile("rb").readline().split()[1] == b"400"


def test_a_compressed_body_is_refused_by_its_encoding(shared: WorkerProcess) -> None:
    packed = gzip.compress(b'{"model": "m", "prompt": "x"}')
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = shared.client.post(path, content=packed, headers={"content-encoding": "gzip"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
        assert answer.headers["accept-encoding"] == "identity" and "'gzip'" in answer.json()["error"]["message"]
    plain = {"content-encoding": "identity"}
    assert shared.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=plain).status_code == 200


def test_a_path_with_a_slash_at_its_end_is_the_path(shared: WorkerProcess) -> None:
    assert shared.client.get("/v1/models/").json() == shared.client.get("/v1/models").json()
    assert shared.client.get("/v1/models/?a=/").json() == shared.client.get("/v1/models").json()
    assert shared.client.post("/v1/completions/", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert shared.client.get("/v1/models//").status_code == 404


def test_top_p_0_is_greedy(shared: WorkerProcess) -> None:
    body = {"prompt": "The sea", "max_tokens": 8, "ignore_eos": True}
    greedy = shared.complete(**body, temperature=0)["choices"][0]["text"]
    assert shared.complete(**body, temperature=1, top_p=0, seed=3)["choices"][0]["text"] == greedy


def test_unknown_paths_and_methods(shared: WorkerProcess) -> None:
    assert shared.client.get("/v2/none").json()["error"]["code"] == "not_found"
    for method, path, allowed in (("GET", "/v1/completions", {"POST"}), ("DELETE", "/v1/models/x", {"GET", "HEAD"})):
        response = shared.client.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
        assert set(response.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("path", INFERENCE)
def test_other_methods_of_inference_paths(shared: WorkerProcess, path: str) -> None:
    """POST does not pass FastAPI's routing; other methods do."""
    for method in ("GET", "PUT"):
        response = shared.client.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, "POST"), method
        _check_shape(path, response.json())


def test_the_admin_port_has_no_inference_paths(start: Callable[..., WorkerProcess]) -> None:
    worker = start(FAIRLEAD_ADMIN_PORT="0").wait_ready()
    found = re.search(r"admin paths on (http://127\.0\.0\.1:\d+)", worker.log.read_text())
    assert found
    for path in INFERENCE:
        for method in ("GET", "POST"):
            response = httpx.request(method, found[1] + path, json={"prompt": "x", "max_tokens": 1})
            assert response.status_code == 404, (method, path)
            _check_shape(path, response.json())
    assert worker.complete(prompt="x", max_tokens=1)["choices"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("POST", path, 400) for path in INFERENCE),
        ("GET", "/v1/responses/none", 404),
        ("DELETE", "/v1/responses/none", 404),
        ("POST", "/v1/load_lora_adapter", 403),
    ],
)
def test_an_error_before_the_first_byte_has_the_apis_shape(shared: WorkerProcess, method: str, path: str, status: int) -> None:
    """Whether the handler was called through FastAPI or not."""
    response = shared.client.request(method, path, content=b"[1" if method == "POST" else None)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json"), response.text
    assert response.headers["x-request-id"]
    _check_shape(path, response.json())


def _check_shape(path: str, answer: dict[str, Any]) -> None:
    if path in (MESSAGES, COUNT_TOKENS):
        assert set(answer) == {"type", "error"} and answer["type"] == "error" and set(answer["error"]) == {"type", "message"}
    else:
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("framing", [b"Content-Length: 104857600", b"Transfer-Encoding: chunked"])
def test_100_megabytes_are_refused_early(shared: WorkerProcess, framing: bytes) -> None:
    sent, answer = 0, b""
    piece = b"x" * 65536
    with socket.create_connection(("127.0.0.1", shared.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n")
        connection.settimeout(0.01)
        while sent < 104857600 and not answer:
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                pass
            connection.settimeout(60)
            connection.sendall(b"10000\r\n" + piece + b"\r\n" if b"chunked" in framing else piece)
            connection.settimeout(0.01 if sent > 8 << 20 or b"chunked" not in framing else 0.0001)
            sent += len(piece)
        connection.settimeout(60)
        while not answer.endswith(b"}}"):  # head and body may arrive separately
            more = connection.recv(65536)
            assert more, answer
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413"), head
    assert b"request_too_large" in body
    assert b"connection: close" in head.lower()
    assert sent < 20 << 20, "most of the body was never sent"
    assert shared.client.get("/health").status_code == 200


def test_100_megabytes_with_an_ordinary_client(shared: WorkerProcess) -> None:
    response = shared.client.post("/v1/completions", content=b"x" * 104857600)
    assert response.status_code == 413
