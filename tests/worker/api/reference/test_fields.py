"""The notes on request fields are correct: refused fields are refused, and fields without effect change nothing."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam

from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.sampling import GenerationOptions, read_options
from fairlead_worker.api.generation.unsupported_fields import HINTS, REFUSALS
from fairlead_worker.api.reference.fields import ENDPOINTS, NOTES, OWN_NOTES, REFUSED
from fairlead_worker.api.reference.openapi import build_document
from fairlead_worker.api.routes.apis import select_apis
from fairlead_worker.api.schema import StreamOptions, parse

APIS = select_apis("all")
BODIES = {each.path: each.body for operations in APIS.values() for each in operations if each.body is not None}
VALUES: dict[str, Any] = {"stream_options": {"include_obfuscation": True}}
"""Refused values."""


def understood(path: str, **fields: Any) -> GenerationOptions:
    return read_options(parse(json.dumps({"seed": 1, **fields}).encode(), ENDPOINTS[path]), {})


@pytest.mark.parametrize("path", ENDPOINTS)
def test_refused_fields_are_refused_and_fields_without_effect_change_nothing(path: str) -> None:
    known = set(ENDPOINTS[path].__struct_fields__)
    for field in REFUSED.keys() & known:
        with pytest.raises(ApiError) as refused:
            understood(path, stream=True, **{field: VALUES[field]})
        assert refused.value.status == 400 and str(refused.value.param).startswith(field)
    for field in REFUSALS.keys() & known:
        for value in ("something", 7, True, ["text", "audio"], {"type": "approximate"}, [{}]):
            with pytest.raises(ApiError) as refused:
                understood(path, **{field: value})
            assert (refused.value.status, refused.value.param) == (400, field)
            assert field in refused.value.message
        for value in (None, *REFUSALS[field].accepted):
            assert understood(path, **{field: value}) == understood(path)
    assert all(understood(path, **{field: {"any": 1}}) == understood(path) for field in HINTS.keys() & known)


@pytest.mark.parametrize("path", BODIES)
def test_null_is_as_if_a_field_were_left_out(path: str) -> None:
    body = BODIES[path]
    needed = {field.name: {"tokens": [5]}.get(field.name, "x") for field in msgspec.structs.fields(body) if field.required}
    nulls = dict.fromkeys(body.__struct_fields__) | needed
    assert parse(json.dumps(nulls).encode(), body) == parse(json.dumps(needed).encode(), body)


def test_every_note_is_on_a_field_that_exists() -> None:
    known = {field for body in ENDPOINTS.values() for field in body.__struct_fields__}
    assert known >= {*NOTES, *REFUSED, *REFUSALS, *HINTS, *(field for notes in OWN_NOTES.values() for field in notes)}


@pytest.mark.parametrize(("path", "params"), [("/v1/completions", completion_create_params), ("/v1/chat/completions", chat_params)])
def test_every_field_of_the_openai_sdk_is_known(path: str, params: Any) -> None:
    """A new OpenAI field fails here until its support is decided."""
    theirs = {*params.CompletionCreateParamsBase.__annotations__, *params.CompletionCreateParamsStreaming.__annotations__}
    assert theirs <= {*ENDPOINTS[path].__struct_fields__}


def test_a_thinking_budget_of_minus_one_is_none() -> None:
    assert understood("/v1/chat/completions", thinking_token_budget=-1).thinking_token_budget is None
    assert understood("/v1/chat/completions", thinking_token_budget=0).thinking_token_budget == 0
    with pytest.raises(ApiError, match="thinking_token_budget"):
        understood("/v1/chat/completions", thinking_token_budget=-2)


def test_sglangs_names_of_formats_are_vllms() -> None:
    for theirs, ours, value in (
        ("regex", "guided_regex", "a+"),
        ("ebnf", "guided_grammar", 'root ::= "a"'),
        ("json_schema", "guided_json", "{}"),
    ):
        first, second = (understood("/v1/completions", **{name: value}).constraint for name in (theirs, ours))
        assert first is not None and second is not None
        assert (first.kind, first.text, first.field) == (second.kind, second.text, theirs)


def test_stream_options_are_the_sdks() -> None:
    assert ChatCompletionStreamOptionsParam.__annotations__.keys() <= set(StreamOptions.__struct_fields__)


def test_the_document_has_every_path_and_field() -> None:
    said = build_document(APIS)
    for path, body in BODIES.items():
        (_, _, name) = said["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")
        schema = {**said["components"]["schemas"][name], "components": said["components"]}
        assert schema["properties"].keys() == set(body.__struct_fields__)
        jsonschema.Draft202012Validator.check_schema(schema)
    chat = said["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["use_beam_search"]["anyOf"] == [{"type": "null"}, {"type": "boolean", "const": False}]
    assert "not stored" in chat["store"]["description"]
    assert chat["seed"]["description"] == NOTES["seed"]


@pytest.mark.parametrize("choice", ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_every_tool_choice_gets_past_the_sampling_fields(choice: Any) -> None:
    """`tool_choice.parse_tool_use`, which knows the tools, validates them."""
    assert understood("/v1/chat/completions", tools=[{"type": "function", "function": {"name": "f"}}], tool_choice=choice).n == 1
