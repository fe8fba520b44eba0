"""Custom tools and the calls of OpenAI's first API have the prompts of functions."""

import json
from typing import Any

import pytest

from fairlead_common.prompts.other_calls import as_functions, as_tool_calls

QUESTION = {"role": "user", "content": "q"}


def called(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_custom_calls_are_calls_with_one_text() -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "f", "input": 'say "é"'}}
    (message,) = as_tool_calls([{"role": "assistant", "tool_calls": [custom, called("d", "{}")]}])
    first, second = message["tool_calls"]
    assert json.loads(first["function"].pop("arguments")) == {"input": 'say "é"'}
    assert first == {"id": "c", "type": "function", "function": {"name": "f"}} and second == called("d", "{}")


def test_a_function_call_and_its_result_have_one_id() -> None:
    given = [
        QUESTION,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "r"},
    ]
    assert as_tool_calls(given) == [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [called("call_1", "{}")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
    ]


@pytest.mark.parametrize(
    "messages",
    [None, "text", [], [5], [QUESTION], [{"role": "assistant", "function_call": None}], [{"role": "function", "content": "r"}]],
)
def test_other_messages_are_unchanged(messages: Any) -> None:
    """Also malformed ones, which the renderer refuses by name."""
    assert as_tool_calls(messages) == messages and as_functions(messages) == messages


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        (None, ""),
        ({"type": "text"}, ""),
        ({"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}}, "start: /a/"),
        ({"type": "grammar", "syntax": "regex", "definition": "a+"}, "a+"),
    ],
)
def test_a_custom_tool_is_a_function_whose_description_has_the_grammar(form: Any, grammar: str) -> None:
    (tool,) = as_functions([{"type": "custom", "custom": {"name": "f", "description": "d", "format": form}}])
    assert tool["function"]["name"] == "f" and list(tool["function"]["parameters"]["properties"]) == ["input"]
    assert tool["function"]["description"].startswith("d") and tool["function"]["description"].endswith(grammar or "d")
