"""Whatever agents' programs put together is served, its texts are in the chat, and the warning names what is not."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_common.errors import PromptError
from fairlead_common.protocols.chat_builder import ChatBuilder
from fairlead_common.protocols.chats import read_conversion
from fairlead_common.protocols.conversion import Conversion
from fairlead_common.protocols.paths import MESSAGES, RESPONSES

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
ENCRYPTED = "c2VjcmV0"
CACHE = {"type": "ephemeral", "ttl": "1h"}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCRYPTED}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ENCRYPTED}}
Json = dict[str, Any]


def text(block: Json) -> tuple[Json, str]:
    """Return a block whose text is in the prompt."""
    return block, "prose"


def note(block: Json) -> tuple[Json, str]:
    """Return a block that the warning names."""
    return block, "noted"


def both(block: Json) -> tuple[Json, str]:
    """Return a block whose text is in the prompt and that the warning names."""
    return block, "both"


CLAUDE_TOOLS = [
    {"name": "Read", "description": "d", "input_schema": SCHEMA, "cache_control": CACHE, "eager_input_streaming": True},
    {"type": "custom", "name": "Edit", "input_schema": SCHEMA, "defer_loading": True, "allowed_callers": ["direct"], "strict": False},
    {"name": "mcp__s__find", "input_schema": SCHEMA, "input_examples": [{"x": "y"}]},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
]
CLAUDE_ELSEWHERE = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    {"type": "text_editor_20250124", "name": "str_replace_editor"},
    {"type": "advisor_20260301", "name": "advisor", "model": "m"},
    {"type": "mcp_toolset", "mcp_server_name": "s"},
]
RESULT_BLOCKS = [
    text({"type": "text", "text": "WORD", "cache_control": CACHE}),
    text({"type": "tool_reference", "tool_name": "WORD"}),
    text({"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "WORD"}]}),
    text({"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "WORD"}}),
    text({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "WORD"}]}}),
    note(PICTURE),
    note(PDF),
    note({"type": "image", "source": {"type": "url", "url": "http://x"}}),
    both({"type": "browser_state", "text": "WORD"}),
]
ANSWER_BLOCKS = [
    text({"type": "text", "text": "WORD", "citations": None}),
    text({"type": "thinking", "thinking": "WORD", "signature": ENCRYPTED}),
    text({"type": "compaction", "content": "WORD"}),
    note({"type": "redacted_thinking", "data": ENCRYPTED}),
    note({"type": "container_upload", "file_id": "f"}),
    both({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "WORD"}, "caller": {"type": "direct"}}),
    both(
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"type": "web_search_result", "title": "WORD", "url": "u", "encrypted_content": ENCRYPTED, "page_age": None}],
        }
    ),
    both({"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "web_search_tool_result_error", "error_code": "WORD"}}),
    both(
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "s",
            "content": {
                "type": "web_fetch_result",
                "url": "u",
                "content": {"type": "document", "source": {"type": "text", "data": "WORD"}},
            },
        }
    ),
    both({"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"type": "code_execution_result", "stdout": "WORD"}}),
    both({"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": {"stdout": "WORD", "content": []}}),
    both({"type": "tool_search_tool_result", "tool_use_id": "s", "content": {"tool_references": [{"tool_name": "WORD"}]}}),
    both({"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {"x": "WORD"}}),
    both({"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": [{"type": "text", "text": "WORD"}]}),
    both({"type": "advisor_tool_result", "tool_use_id": "s", "content": {"type": "advisor_result", "text": "WORD"}}),
]
QUESTION_BLOCKS = [*RESULT_BLOCKS[:5], note({"type": "container_upload", "file_id": "f"})]
CLAUDE_FIELDS: dict[str, list[Any]] = {
    "context_management": [{"edits": []}, {"edits": [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}]}, None],
    "container": [None, "c", {"id": "c", "skills": []}],
    "mcp_servers": [[], [{"type": "url", "url": "http://x", "name": "s"}]],
    "betas": [["a-2025-01-01"]],
    "diagnostics": [{"previous_message_id": None}],
    "inference_geo": ["us"],
    "speed": ["fast", "standard"],
    "thinking": [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}],
    "output_config": [{"effort": "max"}, {"format": {"type": "json_schema", "schema": SCHEMA}}],
    "output_format": [{"type": "json_schema", "schema": SCHEMA}],
    "metadata": [{"user_id": json.dumps({"device_id": "d" * 400})}, {}],
    "stop_sequences": [[]],
    "service_tier": ["auto", "standard_only"],
    "tool_choice": [{"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}],
    "system": ["s", [{"type": "text", "text": "s", "cache_control": CACHE}, PICTURE], []],
    "fallbacks": [[{"model": "m"}], None],
}


def some_of(values: list[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), max_size=4)


def some_fields(fields: dict[str, list[Any]]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in fields.items()})


def number_texts(parts: list[tuple[Json, str]], words: list[str], kinds: set[str]) -> list[Json]:
    """Return parts with a different word in each text. Add the words and the noted types."""
    made = []
    for part, meaning in parts:
        word = f"WORD{len(words)}."
        if meaning in ("prose", "both"):
            words.append(word)
        if meaning in ("noted", "both"):
            kinds.add(part["type"])
        made.append(json.loads(json.dumps(part).replace("WORD", word)))
    return made


def check(conversion: Conversion, words: list[str], kinds: set[str]) -> None:
    chat, warning = json.dumps(conversion.chat), "; ".join(conversion.omissions.describe())
    assert not [word for word in words if word not in chat]
    assert ENCRYPTED not in chat
    named = warning.count(",") + 1
    assert not [kind for kind in kinds if kind not in warning] or named >= 10, (kinds, warning)
    assert warning.isascii() and warning.isprintable()


@settings(deadline=None)
@given(
    rounds=st.lists(st.tuples(some_of(QUESTION_BLOCKS), some_of(ANSWER_BLOCKS), some_of(RESULT_BLOCKS), st.booleans()), max_size=3),
    tools=some_of(CLAUDE_TOOLS),
    elsewhere=some_of(CLAUDE_ELSEWHERE),
    fields=some_fields(CLAUDE_FIELDS),
    last=some_of(QUESTION_BLOCKS),
)
def test_claude_code(rounds: Any, tools: list[Json], elsewhere: list[Json], fields: Json, last: list[Any]) -> None:
    words: list[str] = []
    kinds: set[str] = {tool["type"] for tool in elsewhere}
    messages: list[Json] = []
    for question, answer, result, later in rounds:
        told = {"type": "text", "text": "q"}
        messages.append({"role": "user", "content": [told, *number_texts([*question, note(PICTURE)], words, kinds)]})
        use = {"type": "tool_use", "id": f"toolu_{len(messages)}", "name": "Read", "input": {}, "caller": {"type": "direct"}}
        messages.append({"role": "assistant", "content": [*number_texts(answer, words, kinds), use]})
        results = {"type": "tool_result", "tool_use_id": use["id"], "content": number_texts(result, words, kinds), "is_error": later}
        messages.append({"role": "user", "content": [results, told, *number_texts([note(PDF)], words, kinds)]})
        if later:
            messages.append({"role": "system", "content": "later"})
    messages.append({"role": "user", "content": [{"type": "text", "text": "q"}, *number_texts(last, words, kinds)]})
    body = {"max_tokens": 9, "messages": messages, "tools": [*elsewhere, *tools], "stream": True, **fields}
    conversion = read_conversion(MESSAGES, json.dumps(body).encode())
    check(conversion, words, kinds)
    offered = [tool["function"]["name"] for tool in conversion.chat.get("tools", ())]
    assert offered == [tool["name"] for tool in tools]
    assert list(conversion.tool_fields) == [f"tools[{at + len(elsewhere)}]" for at in range(len(tools))]


CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "d",
    "format": {"type": "grammar", "syntax": "lark", "definition": "WORD"},
}
FUNCTION = {"type": "function", "name": "exec", "strict": False, "parameters": SCHEMA, "defer_loading": True, "output_schema": SCHEMA}
CODEX_TOOLS: list[tuple[Json, list[str]]] = [
    (FUNCTION, ["exec"]),
    (CUSTOM, ["apply_patch"]),
    ({"type": "namespace", "name": "agents", "description": "d", "tools": [FUNCTION, CUSTOM]}, ["agents__exec", "agents__apply_patch"]),
    ({"type": "namespace", "name": "mcp__s__", "description": "d", "tools": [FUNCTION]}, ["mcp__s__exec"]),
    ({"type": "local_shell"}, ["local_shell"]),
    ({"type": "tool_search", "execution": "client", "description": "d", "parameters": SCHEMA}, ["tool_search"]),
]
OPENAI_ELSEWHERE = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "image_generation", "output_format": "png"},
    {"type": "mcp", "server_label": "s"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "computer_use_preview"},
    {"type": "shell"},
    {"type": "apply_patch"},
]
IMAGE_PART = {"type": "input_image", "image_url": f"data:image/png;base64,{ENCRYPTED}", "detail": "high"}
ITEMS = [
    text({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "WORD"}]}),
    text({"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "WORD"}]}),
    text({"role": "assistant", "content": "WORD", "phase": "commentary"}),
    text({"type": "agent_message", "author": "/root", "recipient": "/a", "content": [{"type": "input_text", "text": "WORD"}]}),
    text({"type": "reasoning", "summary": [{"type": "summary_text", "text": "WORD"}], "encrypted_content": ENCRYPTED}),
    text({"type": "function_call", "call_id": "c", "name": "exec", "namespace": "agents", "arguments": '{"x": "WORD"}'}),
    text({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "WORD"}]}),
    text({"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "WORD", "status": "completed"}),
    text({"type": "custom_tool_call_output", "call_id": "c", "output": "WORD"}),
    text({"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"type": "exec", "command": ["WORD"], "env": {}}}),
    text({"type": "local_shell_call_output", "id": "c", "output": "WORD"}),
    text({"type": "shell_call", "call_id": "c", "action": {"commands": ["WORD"]}}),
    text({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "WORD", "outcome": {"type": "exit", "exit_code": 0}}]}),
    text({"type": "apply_patch_call", "call_id": "c", "operation": {"type": "WORD", "path": "p", "diff": ""}}),
    text({"type": "computer_call", "call_id": "c", "action": {"type": "WORD", "x": 1}}),
    text({"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "WORD"}}),
    text({"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [{**FUNCTION, "name": "WORD"}]}),
    text({"type": "additional_tools", "role": "developer", "tools": [{**FUNCTION, "name": "WORD"}]}),
    both({"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "WORD"}}),
    both({"type": "code_interpreter_call", "id": "ci", "code": "WORD", "container_id": "c", "outputs": None, "status": "completed"}),
    both({"type": "mcp_call", "id": "m", "name": "f", "server_label": "s", "arguments": "{}", "output": "WORD"}),
    both({"type": "image_generation_call", "id": "ig", "status": "completed", "revised_prompt": "WORD", "result": ENCRYPTED}),
    note({"type": "compaction", "encrypted_content": ENCRYPTED}),
    note({"type": "compaction_summary", "encrypted_content": ENCRYPTED}),
    note({"type": "context_compaction"}),
    note({"type": "compaction_trigger"}),
    note({"type": "item_reference", "id": "i"}),
    note({"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []}),
]  # fmt: skip
SILENT_ITEMS = [
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": ENCRYPTED},
    {"type": "function_call_output", "call_id": "c", "output": [IMAGE_PART]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "see"}, IMAGE_PART]},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": f"data:{ENCRYPTED}"}},
]
CODEX_FIELDS: dict[str, list[Any]] = {
    "instructions": ["i", None],
    "truncation": ["auto", "disabled"],
    "service_tier": ["priority", "auto"],
    "prompt_cache_key": ["k"],
    "include": [["reasoning.encrypted_content", "web_search_call.action.sources"], []],
    "reasoning": [{"effort": "high", "summary": "detailed"}, {"summary": "none"}, {"summary": "concise", "context": "all_turns"}, None],
    "text": [{"verbosity": "low"}, {"verbosity": "high", "format": {"type": "text"}}],
    "client_metadata": [{"x-codex": "{}"}],
    "store": [False],
    "parallel_tool_calls": [True, False],
    "background": [False],
    "context_management": [[{"type": "compaction", "compact_threshold": 1000}]],
    "tool_choice": ["auto", "none"],
    "stream_options": [{"include_obfuscation": False}, {"include_obfuscation": True}],
    "max_tool_calls": [3],
}


@settings(deadline=None)
@given(
    items=some_of(ITEMS),
    silent=some_of(SILENT_ITEMS),
    tools=st.lists(st.sampled_from(CODEX_TOOLS), max_size=6, unique_by=lambda each: id(each[0])),
    elsewhere=some_of(OPENAI_ELSEWHERE),
    fields=some_fields(CODEX_FIELDS),
)
def test_codex(items: list[Any], silent: list[Json], tools: list[Any], elsewhere: list[Json], fields: Json) -> None:
    words: list[str] = []
    kinds: set[str] = {tool["type"] for tool in elsewhere}
    told = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]}
    body = {"input": [*number_texts(items, words, kinds), *silent, told], "tools": [*elsewhere, *(tool for tool, _ in tools)], **fields}
    conversion = read_conversion(RESPONSES, json.dumps(body).encode())
    check(conversion, words, kinds)
    offered = [tool["function"]["name"] for tool in conversion.chat.get("tools", ())]
    expected = [name for _, names in tools for name in names]
    assert offered[: len(expected)] == expected and len(offered) == len(conversion.tool_fields)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, PICTURE]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [PDF]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "see"}, IMAGE_PART]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": ENCRYPTED}]}]}),
    ],
)
def test_a_picture_in_the_last_question_is_refused(path: str, body: Json) -> None:
    with pytest.raises(PromptError) as refused:
        read_conversion(path, json.dumps(body).encode())
    assert refused.value.field.endswith(".type") and "text only" in refused.value.reason


def test_a_call_without_its_result_is_interrupted() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    body = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [use]}]}
    chat = read_conversion(MESSAGES, json.dumps(body).encode()).chat
    assert [each["role"] for each in chat["messages"]] == ["user", "assistant", "tool"] and "continue_final_message" not in chat


@pytest.mark.parametrize(("given", "expected"), [(None, "{}"), ([1], "[1]"), ('{"x": 1', '{"x": 1'), ({"x": 1}, '{"x":1}')])
def test_arguments_of_any_form_are_served(given: Any, expected: str) -> None:
    """A client sends back what it got, also of an answer that was cut."""
    use = {"type": "tool_use", "id": "t", "name": "f", "input": given}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [use, {"type": "thinking", "thinking": None}]}]
    call = {"type": "function_call", "call_id": "t", "name": "f", "arguments": given}
    for path, body in ((MESSAGES, {"messages": messages}), (RESPONSES, {"input": [call, {"role": "assistant", "content": None}]})):
        chat = read_conversion(path, json.dumps(body).encode()).chat
        (made,) = (call for message in chat["messages"] for call in message.get("tool_calls", ()))
        assert made["function"]["arguments"] == expected


def test_the_system_prompt_is_the_same_in_each_request() -> None:
    """Claude Code begins it with a text that changes: no prefix would be cached."""
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}, {"type": "text", "text": "Be brief."}]
    chat = read_conversion(MESSAGES, json.dumps({"system": system, "messages": [{"role": "user", "content": "q"}]}).encode()).chat
    assert chat["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_proxy_may_join_the_texts_of_the_system_prompt() -> None:
    body = {"system": "x-anthropic-billing-header: cch=1;\n\nBe brief.\nBe kind.", "messages": [{"role": "user", "content": "q"}]}
    chat = read_conversion(MESSAGES, json.dumps(body).encode()).chat
    assert chat["messages"][0] == {"role": "system", "content": "Be brief.\nBe kind."}


def test_an_answer_of_many_items_is_not_copied_for_each() -> None:
    builder = ChatBuilder()
    for word in ("a", "b"):
        builder.add_reasoning(word)
    for word in ("a", "b"):
        builder.add_answer(word)
    (message,) = builder.messages
    parts = message["content"]
    builder.add_answer("c")
    assert message["content"] is parts and [part["text"] for part in parts] == ["a", "b", "c"]
    assert message["reasoning_content"] == "ab"


def test_ids_in_the_arguments_of_other_tools_are_kept() -> None:
    use = {"type": "server_tool_use", "id": "s", "name": "find", "input": {"id": 7, "status": "open"}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [use]}, {"role": "user", "content": "r"}]
    chat = read_conversion(MESSAGES, json.dumps({"messages": messages}).encode()).chat
    assert json.loads(chat["messages"][1]["content"]) == {"type": "server_tool_use", "name": "find", "input": {"id": 7, "status": "open"}}
    search = {"type": "tool_search_call", "id": "s", "call_id": "c", "status": "completed", "arguments": {"id": 7}}
    chat = read_conversion(RESPONSES, json.dumps({"input": [search]}).encode()).chat
    assert chat["messages"][0]["tool_calls"][0]["function"] == {"name": "tool_search", "arguments": '{"id":7}'}


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (MESSAGES, {"type": "mcp_tool_use", "id": "m1", "name": "close", "input": {"id": 7, "status": {"id": "open"}}}),
        (RESPONSES, {"type": "shell_call", "call_id": "m1", "action": {"id": 7, "status": {"id": "open"}}}),
        (RESPONSES, {"type": "mcp_call", "id": "m1", "name": "close", "arguments": {"id": 7, "status": {"id": "open"}}}),
        (RESPONSES, {"type": "function_call_output", "call_id": "m1", "output": {"id": 7, "status": {"id": "open"}}}),
        (RESPONSES, {"type": "foo_call_output", "call_id": "m1", "output": [{"id": 7, "status": {"id": "open"}}]}),
        (RESPONSES,
         {"type": "tool_search_output", "call_id": "m1", "tools": [{"type": "x", "parameters": {"id": 7, "status": {"id": "open"}}}]}),
    ],
)  # fmt: skip
def test_what_a_call_carries_keeps_keys_that_are_ids_in_blocks(path: str, part: Json) -> None:
    question = {"role": "user", "content": "Go."}
    given = (
        {"messages": [question, {"role": "assistant", "content": [part]}, question]} if path == MESSAGES else {"input": [question, part]}
    )
    chat = json.dumps(read_conversion(path, json.dumps(given).encode()).chat["messages"]).replace("\\", "")
    assert '"id":7,"status":{"id":"open"}' in chat


def test_the_warning_is_short_however_deep_the_field_is() -> None:
    blocks = []
    for at in range(100):
        block: Json = {"type": f"kind_{at}"}
        for _ in range(120):
            block = {"type": "document", "source": {"type": "content", "content": [block]}}
        blocks.append(block)
    body = {"messages": [{"role": "user", "content": blocks}]}
    described = "; ".join(read_conversion(MESSAGES, json.dumps(body).encode()).omissions.describe())
    assert len(described) < 2000 and "document messages[0].content[0].source.content[0]" in described


HELLO = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(("wrong", "shown"), [(None, "null"), (True, "true"), ({"a": [None, False]}, '{"a":[null,false]}')])
@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        (MESSAGES, "messages[0].role", lambda wrong: {"messages": [{"role": wrong, "content": "x"}]}),
        (MESSAGES, "messages[0].content[0].type", lambda wrong: {"messages": [{"role": "user", "content": [{"type": wrong}]}]}),
        (MESSAGES, "tool_choice.type", lambda wrong: {"messages": HELLO, "tool_choice": {"type": wrong}}),
        (MESSAGES, "thinking.type", lambda wrong: {"messages": HELLO, "thinking": {"type": wrong}}),
        (RESPONSES, "input[0].role", lambda wrong: {"input": [{"role": wrong, "content": "x"}]}),
        (RESPONSES, "tool_choice.type", lambda wrong: {"input": "x", "tool_choice": {"type": wrong}}),
        (RESPONSES, "tool_choice.mode", lambda wrong: {"input": "x", "tool_choice": {"type": "allowed_tools", "mode": wrong, "tools": []}}),
    ],
)
def test_errors_show_values_as_json(path: str, field: str, body: Any, wrong: Any, shown: str) -> None:
    with pytest.raises(PromptError, match=re.escape(shown)) as refused:
        read_conversion(path, json.dumps(body(wrong)).encode())
    assert refused.value.field == field
