"""Every field in the clients' own types works or is refused with its name."""

import json
from typing import Any, get_type_hints

import pytest
from anthropic.types import beta, message_count_tokens_params, message_create_params
from openai.types.responses import response_create_params

from fairlead_common.errors import PromptError
from fairlead_common.protocols import messages, responses
from fairlead_common.protocols.chats import read_chat, read_conversion
from fairlead_common.protocols.fields import SHARED_FIELDS
from fairlead_common.protocols.paths import MESSAGES, RESPONSES
from fairlead_worker.api.errors import ApiError, invalid
from fairlead_worker.api.protocols.chat_body import rename_error_fields, to_chat_request
from fairlead_worker.api.protocols.field_table import BODIES, NOTES
from fairlead_worker.api.schema import ChatRequest

LEAST: dict[str, dict[str, Any]] = {RESPONSES: {"input": "q"}, MESSAGES: {"messages": [{"role": "user", "content": "q"}]}}
CLIENTS: dict[str, list[Any]] = {
    RESPONSES: [response_create_params.ResponseCreateParamsNonStreaming],
    MESSAGES: [
        message_create_params.MessageCreateParamsNonStreaming,
        message_count_tokens_params.MessageCountTokensParams,
        beta.message_create_params.MessageCreateParamsNonStreaming,
        beta.message_count_tokens_params.MessageCountTokensParams,
    ],
}


def chat(path: str, **fields: Any) -> dict[str, Any]:
    return read_chat(path, json.dumps(LEAST[path] | fields).encode())


@pytest.mark.parametrize("path", BODIES)
def test_every_field_of_the_real_client_is_known(path: str) -> None:
    known = set(BODIES[path][0].__struct_fields__)
    for params in CLIENTS[path]:
        assert set(get_type_hints(params)) <= known
    assert set(NOTES[path]) <= known and set(SHARED_FIELDS) <= known


@pytest.mark.parametrize("path", BODIES)
def test_what_the_page_calls_refused_is_refused(path: str) -> None:
    _, refusals, allowed = BODIES[path]
    for field in refusals:
        with pytest.raises(PromptError) as refused:
            chat(path, **{field: {"any": "thing"}})
        assert refused.value.field == field
        assert chat(path, **{field: None}) == chat(path)
    for field, values in allowed.items():
        with pytest.raises(PromptError) as refused:
            chat(path, **{field: "another"})
        assert refused.value.field == field
        assert all(chat(path, **{field: value}) == chat(path) for value in values)


@pytest.mark.parametrize("path", BODIES)
def test_a_chats_rules_hold_for_its_fields(path: str) -> None:
    def request(**fields: Any) -> ChatRequest:
        return to_chat_request(read_conversion(path, json.dumps(LEAST[path] | fields).encode()))

    assert isinstance(request(seed=5, top_k=3, priority=1), ChatRequest)
    with pytest.raises(ApiError) as refused:
        request(seed="five")
    assert refused.value.param == "seed"


def test_errors_of_a_chat_name_the_apis_own_fields() -> None:
    with pytest.raises(ApiError) as told, rename_error_fields(messages.RENAMED):
        raise invalid("stop: at most 16, not 17; it would stop everything", param="stop")
    assert (told.value.param, told.value.message) == (
        "stop_sequences",
        "stop_sequences: at most 16, not 17; it would stop everything",
    )
    with pytest.raises(ApiError) as told, rename_error_fields(responses.RENAMED):
        raise invalid("response_format.json_schema.schema: more than max_completion_tokens", param="response_format.json_schema.schema")
    assert (told.value.param, told.value.message) == ("text.format.schema", "text.format.schema: more than max_output_tokens")
