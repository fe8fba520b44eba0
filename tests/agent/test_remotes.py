"""Fields by which a client could make the engine connect elsewhere, in every place where an engine reads them."""

import json
from typing import Any

import pytest

from fairlead_agent.remotes import AllowedRemotes, RemoteRefused
from fairlead_common.protocols.paths import CHAT

URL = "http://169.254.169.254/latest/meta-data"
DATA = "data:image/png;base64,aGVsbG8="


def part(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, value]}]}


PLACES: dict[str, Any] = {
    "vLLM: image_url": lambda url: part({"type": "image_url", "image_url": {"url": url}}),
    "vLLM: image_url, short": lambda url: part({"image_url": url}),
    "vLLM: audio_url": lambda url: part({"type": "audio_url", "audio_url": {"url": url}}),
    "vLLM: video_url": lambda url: part({"type": "video_url", "video_url": {"url": url}}),
    "vLLM: of a type to come": lambda url: part({"type": "scan_url", "scan_url": {"url": url}}),
    "input_audio with a URL": lambda url: part({"type": "input_audio", "input_audio": {"url": url}}),
    "of an earlier turn": lambda url: {"messages": [{"role": "tool", "content": [{"type": "image_url", "image_url": {"url": url}}]}, {}]},
    "Responses: input_image": lambda url: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
    "Responses: input_file": lambda url: {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": url}]}]},
    "Responses: output of a tool": lambda url: {"input": [{"type": "function_call_output", "output": [{"image_url": url}]}]},
    "Responses: MCP": lambda url: {"input": "x", "tools": [{"type": "mcp", "server_label": "a", "server_url": url}]},
    "Messages: source": lambda url: part({"type": "image", "source": {"type": "url", "url": url}}),
    "Messages: result of a tool": lambda url: part({"type": "tool_result", "content": [{"type": "image", "source": {"url": url}}]}),
    "Messages: MCP": lambda url: {"messages": [], "mcp_servers": [{"type": "url", "url": url}]},
    "SGLang: image of an embedding": lambda url: {"input": [{"text": "a", "image": url}]},
    "SGLang: image_data": lambda url: {"input": "x", "image_data": [url]},
    "vLLM: score": lambda url: {"data_1": {"content": [{"image_url": {"url": url}}]}, "data_2": "x"},
    "vLLM: rerank": lambda url: {"query": "x", "documents": {"content": [{"image_url": {"url": url}}]}},
    "vLLM: processor of pooling": lambda url: {"data": {"data": url, "data_format": "url"}},
    "mm_processor_kwargs": lambda url: {"prompt": "x", "mm_processor_kwargs": {"images": {"any": [{"place": url}]}}},
    "mm_processor_kwargs, a plain name": lambda url: {"prompt": "x", "mm_processor_kwargs": {"text": url}},
    "media_io_kwargs": lambda url: {"prompt": "x", "media_io_kwargs": {"video": {"any": url}}},
}


def check(document: Any, allowed: str = "") -> None:
    AllowedRemotes(allowed).check(json.dumps(document).encode())


@pytest.mark.parametrize("build", PLACES.values(), ids=PLACES)
def test_a_url_is_refused_unless_its_host_is_listed(build: Any) -> None:
    with pytest.raises(RemoteRefused, match=r"169\.254\.169\.254.* is not allowed.*--allowed-remotes"):
        check(build(URL))
    check(build(URL), "https://other.example, http://169.254.169.254")
    check(build(URL), "http://*")
    check(build(DATA))


@pytest.mark.parametrize(
    "value", ["/etc/secret.png", "file:///etc/passwd", "secret.png", " data:image/png,x", "\tHTTP://x", "ftp://x/y", "//x/y", "s3://b/k"]
)
def test_whatever_is_no_data_url_is_refused(value: str) -> None:
    with pytest.raises(RemoteRefused, match=r"messages\[0\]\.content\[1\]\.image_url\.url: "):
        check(part({"type": "image_url", "image_url": {"url": value}}), "https://*")


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://a.example/x?y#z", True),
        ("HTTPS://A.Example:8443", True),
        ("https://b.images.example/x", True),
        ("https://images.example/x", False),
        ("https://a.example.evil/x", False),
        ("http://a.example/x", False),
        ("https://a.example@evil.example/", False),
        ("https://evil.example\\\\@a.example/", False),
        ("https://a.example\\@evil.example/", False),
        ("https://a.example /x", False),
        ("https://evil.example#@a.example", False),
        ("https:a.example/x", False),
        ("https:///a.example/x", False),
    ],
)
def test_only_a_plain_url_of_a_listed_host_is_allowed(url: str, allowed: bool) -> None:
    document = part({"image_url": url})
    if allowed:
        check(document, "https://a.example,https://*.images.example")
    else:
        with pytest.raises(RemoteRefused):
            check(document, "https://a.example,https://*.images.example")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_transfer_params", {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1}),
        ("ec_transfer_params", {"a": 1}),
        ("bootstrap_host", "10.0.0.1"),
        ("bootstrap_port", 8998),
        ("bootstrap_room", [1]),
    ],
)
def test_fields_that_name_a_host_of_kv_blocks_are_refused_unless_listed(field: str, value: Any) -> None:
    for document in ({"prompt": "x", field: value}, {"prompt": "x", "vllm_xargs": {field: value}}):
        with pytest.raises(RemoteRefused, match=field):
            check(document)
        check(document, field)
    check({"prompt": "x", field: None})


def test_an_escaped_name_is_found() -> None:
    body = b'{"prompt": "x", "kv_tr\\u0061nsfer_p\\u0061rams": {"remote_host": "a"}}'
    with pytest.raises(RemoteRefused):
        AllowedRemotes("").check(body)


def test_ordinary_requests_with_urls_are_no_connections() -> None:
    schema = {"type": "object", "properties": {"url": {"type": "string", "default": URL}}, "examples": [{"url": URL}]}
    for document in (
        {"prompt": f"see {URL} and the image, the video and the audio"},
        {"messages": [{"role": "user", "content": URL}], "metadata": {"url": URL}},
        part({"type": "text", "text": URL}),
        {"messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
        {"messages": [], "tools": [{"name": "f", "input_schema": schema}], "response_format": {"json_schema": {"schema": schema}}},
        part({"type": "tool_use", "id": "1", "name": "fetch", "input": {"url": URL}}),
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"url": URL})}}]}]},
        {"input": [{"type": "message", "content": [{"type": "output_text", "text": "x", "annotations": [{"url": URL}]}]}]},
        part({"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}}),
        part({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}),
    ):
        check(document)


def test_documents_of_a_chat_are_for_its_template_and_those_of_a_score_for_the_engine() -> None:
    body = json.dumps({"messages": [], "documents": [{"title": "a", "url": URL}]}).encode()
    AllowedRemotes("").check(body, CHAT)
    with pytest.raises(RemoteRefused, match=r"documents\[0\]\.url: "):
        AllowedRemotes("").check(body, "/v1/rerank")


def test_a_deep_field_is_refused() -> None:
    deep: Any = {"image_url": URL}
    for _ in range(450):
        deep = [deep]
    with pytest.raises(RemoteRefused, match="is not allowed"):
        check({"messages": deep})


def test_texts_in_lists_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """380,000 empty texts would otherwise stop the agent's event loop for 0.4 s."""
    looked = list[str]()
    monkeypatch.setattr(AllowedRemotes, "_is_allowed", lambda self, text, name, is_kwargs: not looked.append(name))
    check({"prompt": ["x"] * 1000, "a": [[""] * 1000]})
    assert looked == []
    check({"input": [{"image": ["x"] * 3}]})
    assert looked == ["image"] * 3


def test_numbers_with_a_fraction_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """300,000 of 40 digits stopped the agent for 3 s."""
    decoded = list[Any]()
    monkeypatch.setattr(AllowedRemotes, "_find_refused", lambda self, document: decoded.append(document))
    check({"prompt": [0.5, 1], "temperature": 1e-7})
    assert decoded == [{"prompt": [None, 1], "temperature": None}]


@pytest.mark.parametrize("type", [[], {}, 1, None, "unknown"])
def test_a_type_of_another_kind_hides_nothing(type: Any) -> None:
    with pytest.raises(RemoteRefused):
        check(part({"type": type, "input": {"image_url": URL}}))


def test_a_document_that_cannot_be_decoded_is_refused() -> None:
    for body in (b'{"prompt": ' + b"[" * 100_000, b'{"prompt": NaN}', b'{"prompt": "\xff"}', b'{"\xff": 1}', b'{"prompt": "\\ud800"}'):
        with pytest.raises(RemoteRefused, match="is not JSON"):
            AllowedRemotes("").check(body)


@pytest.mark.parametrize("entry", ["example.com", "https://", "https://a/b", "https://a b", "kv_params", "https://a*"])
def test_a_wrong_entry_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match="is neither SCHEME://HOST"):
        AllowedRemotes(f"https://ok.example,{entry}")
