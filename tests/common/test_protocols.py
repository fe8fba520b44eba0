"""Bodies of Responses and Messages as equivalent chats."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_common.errors import PromptError
from fairlead_common.protocols import errors
from fairlead_common.protocols.chats import read_chat
from fairlead_common.protocols.messages import MessagesBody
from fairlead_common.protocols.paths import CHAT, MESSAGES, RESPONSES
from fairlead_common.protocols.responses import ResponsesBody

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}


def responses(**fields: Any) -> dict[str, Any]:
    return read_chat(RESPONSES, msgspec.json.encode({"input": "q"} | fields))


def messages(**fields: Any) -> dict[str, Any]:
    return read_chat(MESSAGES, msgspec.json.encode({"messages": [{"role": "user", "content": "q"}]} | fields))


def called(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_reasoning_text_and_calls_of_one_turn_are_one_message() -> None:
    chat = responses(
        instructions="i",
        input=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "q"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "r"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "s"}]},
            {"role": "system", "content": "later"},
        ],
    )
    assert chat["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "i"}, {"type": "text", "text": "d"}]},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "t", "tool_calls": [called("1", "{}"), called("2", "{}")]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "content": "s"},
        {"role": "system", "content": "later"},
    ]


def test_reasoning_starts_a_turn() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
    said = {"role": "assistant", "content": "a"}
    chat = responses(input=[thought, said, thought, said])
    assert chat["messages"] == [{"role": "assistant", "content": "a", "reasoning_content": "t"}] * 2


def test_responses_tools_and_formats() -> None:
    tools = [{"type": "function", **FUNCTION}, {"type": "function", "name": "g"}]
    chat = responses(tools=tools, tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False)
    assert chat["tools"] == [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "g"}}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}} and chat["parallel_tool_calls"] is False
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    chat = responses(tools=tools, tool_choice=allowed)
    listed = [{"type": "function", "function": {"name": "g"}}]
    assert chat["tool_choice"] == {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}}
    assert len(chat["tools"]) == 2
    form = {"type": "json_schema", "name": "n", "schema": {}, "strict": True}
    assert responses(text={"format": form})["response_format"]["json_schema"] == {"name": "n", "schema": {}, "strict": True}
    chat = responses(max_output_tokens=3, top_logprobs=2, reasoning={"effort": "low"}, seed=5, cache_salt="s")
    assert (chat["max_completion_tokens"], chat["logprobs"], chat["top_logprobs"]) == (3, True, 2)
    assert (chat["reasoning_effort"], chat["seed"], chat["cache_salt"]) == ("low", 5, "s")


def test_tool_results_precede_text_about_them() -> None:
    chat = messages(
        system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "so?"},
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "none"}], "is_error": True},
                ],
            },
        ],
    )
    assert chat["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "t", "tool_calls": [called("1", '{"x":"é"}')]},
        {"role": "tool", "tool_call_id": "1", "content": "Error: none"},
        {"role": "user", "content": "so?"},
    ]


@pytest.mark.parametrize("kind", ["search_result", "document"])
def test_a_document_in_a_document_is_json(kind: str) -> None:
    """So that no depth of them ends the stack."""
    inner: dict[str, Any] = {"type": "text", "text": "low"}
    for _ in range(160):
        inner = {"type": kind, "title": "t", "source": {"type": "content", "content": [inner]}}
    content = messages(messages=[{"role": "user", "content": [inner]}])["messages"][0]["content"]
    assert content.startswith('t\n{"type":"') and "…" in content
    shallow = {"type": kind, "content": [{"type": kind, "title": "u", "content": [{"type": "text", "text": "low"}]}]}
    assert "low" in messages(messages=[{"role": "user", "content": [shallow]}])["messages"][0]["content"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", None)),
        ({"type": "tool", "name": "f"}, ({"type": "function", "function": {"name": "f"}}, None)),
    ],
)
def test_messages_tool_choices(choice: dict[str, Any], expected: Any) -> None:
    chat = messages(tools=[{"name": "f", "input_schema": {"type": "object"}}], tool_choice=choice)
    assert (chat["tool_choice"], chat.get("parallel_tool_calls")) == expected
    assert chat["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def test_hints_change_no_prompt_and_no_answer() -> None:
    hints: dict[str, Any] = {"store": True, "service_tier": "flex", "text": {"verbosity": "low"}, "prompt_cache_retention": "24h"}
    assert responses(**hints) == responses()
    assert messages(service_tier="auto_only") == messages()
    adaptive = {"type": "adaptive"}
    assert messages(thinking=adaptive | {"display": "updates"}) == messages(thinking=adaptive), "Claude Code asks so in every request"


def test_messages_thinking_stops_and_continuation() -> None:
    chat = messages(thinking={"type": "enabled", "budget_tokens": 2000}, stop_sequences=["x"], max_tokens=3, metadata={"user_id": "u"})
    assert chat["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True, "thinking_budget": 2000}
    assert (chat["stop"], chat["max_completion_tokens"], chat["user"]) == (["x"], 3, "u")
    assert chat["thinking_token_budget"] == 2000 and "thinking_token_budget" not in messages(thinking={"type": "adaptive"})
    assert messages(thinking={"type": "disabled"}, output_config={"effort": "high"})["reasoning_effort"] == "none"
    assert messages(output_config={"effort": "high"})["reasoning_effort"] == "high"
    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "I"}]
    assert messages(messages=begun)["continue_final_message"] is True and "continue_final_message" not in messages()
    silent = [{"role": "user", "content": "q"}, {"role": "assistant", "content": []}]
    assert "continue_final_message" not in messages(messages=silent)


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (RESPONSES, {"input": [5]}, "input[0]"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        (RESPONSES, {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function"}]}}, "tool_choice.tools[0].name"),
        (RESPONSES, {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        (MESSAGES, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        (MESSAGES, {"thinking": {"type": "between"}}, "thinking.type"),
    ],
)
def test_refusals_name_the_field(path: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(PromptError) as refused:
        (responses if path == RESPONSES else messages)(**fields)
    assert refused.value.field == field


WORDS = [
    "allowed_tools", "any", "arguments", "auto", "budget_tokens", "call_id", "content", "custom", "display", "effort",
    "enabled", "encrypted_content", "format", "function", "function_call", "id", "input", "input_schema", "input_text",
    "is_error", "json_schema", "message", "mode", "name", "output", "reasoning", "role", "summary", "text", "thinking",
    "tool", "tool_result", "tool_use", "tools", "type", "user",
]  # fmt: skip
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.sampled_from(["", *WORDS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=12,
)


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, ResponsesBody), (MESSAGES, MessagesBody)])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_body_is_a_chat_or_refused_with_the_field_named(path: str, body: type[msgspec.Struct], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(body.__struct_fields__), min_size=1, max_size=3, unique=True))
    fields = {
        name: data.draw(
            ANYTHING | st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": ANYTHING}), max_size=2)
        )
        for name in names
    }
    try:
        chat = (responses if path == RESPONSES else messages)(**fields)
        assert isinstance(chat["messages"], list)
    except PromptError as refused:
        assert refused.field and refused.reason
    except msgspec.ValidationError:
        pass  # a field's type is wrong; the worker names it


def test_errors_in_each_protocols_form() -> None:
    document = errors.document(MESSAGES, 413, "m", "k")
    assert msgspec.json.decode(document) == {"type": "error", "error": {"type": "request_too_large", "message": "m"}}
    document = errors.document(RESPONSES, 400, "m", "k", "p", "c")
    assert document == errors.document(CHAT, 400, "m", "k", "p", "c")
    event = errors.event(RESPONSES, document, 7)
    said = msgspec.json.decode(event.removeprefix(b"event: error\ndata: "))
    assert said == {"type": "error", "code": "c", "message": "m", "param": "p", "sequence_number": 7}
    assert b"not of our make" in errors.event(RESPONSES, b"not of our make")
    assert errors.event(CHAT, document) == b"data: " + document + b"\n\n"
