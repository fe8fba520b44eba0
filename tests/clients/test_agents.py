"""What agents' programs send beyond the clients' own examples is served, and the answers have the forms that they read."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.api.documented import check, schema_of
from tests.clients.endpoints import MODEL, Endpoints

pytestmark = pytest.mark.asyncio(loop_scope="session")
WARNING = "x-fairlead-warning"
QUESTION = {"role": "user", "content": "Which files are here?"}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
}
SPAWN = {
    "type": "function",
    "name": "spawn",
    "strict": False,
    "parameters": {"type": "object", "properties": {"who": {"enum": ["a"]}}, "required": ["who"]},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "Other agents", "tools": [SPAWN]}
SHELL = {"type": "local_shell"}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"enum": ["q"]}}, "required": ["query"]},
}
WEB = {"type": "web_search", "external_web_access": False}


@pytest.fixture(scope="session")
def http(url: str) -> Any:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    least: dict[str, Any] = (
        {"max_tokens": 2, "messages": [QUESTION]} if path.startswith("/v1/messages") else {"max_output_tokens": 2, "input": [QUESTION]}
    )
    return http.post(path, json={"model": MODEL, **least, **fields})


def forced(url: str, tools: list[Any], choice: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Return the only item of an answer that must call a tool, and the stream's events of an equal answer."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "input": "Go.",
        "tools": tools,
        "tool_choice": choice,
        "temperature": 0,
        "max_output_tokens": 200,
        **options,
    }
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, _strict_response_validation=True) as client:
        (item,) = client.responses.create(**fields).output
        events = list(client.responses.create(**fields, stream=True))
    document = httpx.get(f"{url}/openapi.json").json()
    schema = schema_of(document, "/v1/responses", media="text/event-stream")
    for event in events:
        check(document, schema, event.model_dump(mode="json", exclude_unset=True))
    return item, events


async def test_a_custom_tool_is_called_with_a_text(url: str) -> None:
    item, events = forced(url, [PATCH], {"type": "custom", "name": "apply_patch"})
    assert item.type == "custom_tool_call" and item.name == "apply_patch" and item.call_id and "{" not in item.input[:1]
    deltas = "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    (last,) = events[-1].response.output
    assert deltas == done.input == last.input == item.input


async def test_a_tool_of_a_namespace_is_called_by_its_own_name(url: str) -> None:
    item, events = forced(url, [WEB, AGENTS], {"type": "function", "name": "spawn", "namespace": "agents"})
    assert (item.type, item.name, item.namespace, json.loads(item.arguments)) == ("function_call", "spawn", "agents", {"who": "a"})
    assert {event.item.namespace for event in events if event.type.startswith("response.output_item")} == {"agents"}


async def test_a_shell_of_the_client_is_called_with_an_action(url: str) -> None:
    item, events = forced(url, [SHELL], "required")
    assert item.type == "local_shell_call" and item.call_id and item.action.type == "exec" and isinstance(item.action.command, list)
    assert events[-1].response.output[0].action == item.action


async def test_a_search_of_the_client_is_called_with_its_arguments(url: str) -> None:
    item, _ = forced(url, [SEARCH], "required")
    assert (item.type, item.execution, item.arguments) == ("tool_search_call", "client", {"query": "q"})


async def test_the_warning_names_what_is_left_out(http: httpx.Client) -> None:
    answer = ask(http, "/v1/responses", tools=[WEB, {"type": "mcp", "server_label": "s"}, SPAWN], include=["file_search_call.results"])
    assert answer.status_code == 200
    assert answer.headers[WARNING] == "left out: include[0], web_search tools[0], mcp tools[1]"
    search = {"type": "web_search_20250305", "name": "web_search"}
    called = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    messages = [QUESTION, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, called]}, QUESTION]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = ask(http, path, messages=messages, tools=[search], context_management={"edits": [{"type": "clear_thinking_20251015"}]})
        assert answer.status_code == 200, answer.text
        left_out = "left out: context_management, redacted_thinking messages[1].content[0], web_search_20250305 tools[0]"
        assert answer.headers[WARNING] == f"{left_out}; passed as text: server_tool_use messages[1].content[1]"
    assert WARNING not in ask(http, "/v1/messages", context_management={"edits": []}, speed="fast", diagnostics={}, betas=["x"]).headers


async def test_the_beta_client_is_served(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        message = client.beta.messages.create(
            model=MODEL,
            max_tokens=2,
            messages=[{"role": "user", "content": "Go."}],
            betas=["context-management-2025-06-27"],
            tools=[{"type": "bash_20250124", "name": "bash"}, {"type": "memory_20250818", "name": "memory"}],
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
            thinking={"type": "adaptive"},
            metadata={"user_id": "u" * 2000},
            stop_sequences=[],
            output_config={"effort": "high"},
        )
    assert message.content


async def test_codex_is_served(http: httpx.Client) -> None:
    """Version 0.171 sends these fields and tools."""
    fields: dict[str, Any] = {
        "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}, QUESTION, QUESTION],
        "tools": [SPAWN, AGENTS, WEB],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"x-codex-turn-metadata": "{}"},
        "truncation": "auto",
    }
    answer = ask(http, "/v1/responses", **fields)
    assert answer.status_code == 200 and answer.headers[WARNING] == "left out: tools[1].description, web_search tools[2]", answer.text
    assert answer.json()["tools"] == fields["tools"]


async def test_worker_and_router_read_the_same_prompt(deployment: Endpoints) -> None:
    """The router sends token ids, so that a difference would show in their number."""
    called = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "a"}
    items = [
        QUESTION,
        QUESTION,
        called,
        {"type": "custom_tool_call_output", "call_id": "c", "output": "b"},
        {"type": "compaction", "encrypted_content": "x"},
    ]
    blocks = [{"type": "server_tool_use", "id": "s", "name": "f", "input": {}}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}]
    bodies = {
        "/v1/responses": {"input": items, "tools": [PATCH, AGENTS, WEB, SEARCH, SHELL], "max_output_tokens": 1},
        "/v1/messages": {
            "messages": [QUESTION, {"role": "assistant", "content": blocks}],
            "tools": [{"type": "bash_20250124", "name": "bash"}],
            "max_tokens": 1,
        },
        "/v1/chat/completions": {"messages": CUSTOM_HISTORY, "tools": [CHAT_PATCH], "max_tokens": 1},
    }
    for path, body in bodies.items():
        usages = []
        async with httpx.AsyncClient(timeout=60) as client:
            for url in (deployment.worker, deployment.router):
                usages.append((await client.post(f"{url}{path}", json=body)).json()["usage"])
        counts = [usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) for usage in usages]
        assert counts[0] == counts[1] > 20, path


CHAT_PATCH: dict[str, Any] = {
    "type": "custom",
    "custom": {"name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}},
}
CUSTOM_HISTORY = [
    QUESTION,
    {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "Done."},
    {"role": "assistant", "content": None, "function_call": {"name": "list", "arguments": "{}"}},
    {"role": "function", "name": "list", "content": "a.txt"},
    QUESTION,
]


async def test_a_custom_tool_of_a_chat_is_called_with_a_text(url: str) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": CUSTOM_HISTORY,
        "tools": [CHAT_PATCH, {"type": "function", "function": {"name": "list"}}],
    }
    fields |= {"tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}}, "temperature": 0, "max_tokens": 200}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        choice = client.chat.completions.create(**fields).choices[0]
        (call,) = choice.message.tool_calls or ()
        assert call.type == "custom" and call.custom.name == "apply_patch" and call.id
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    deltas: list[Any] = [each.model_dump() for chunk in chunks for each in chunk.delta.tool_calls or ()]
    assert [delta["type"] for delta in deltas if delta.get("id")] == ["custom"] and chunks[-1].finish_reason == choice.finish_reason
    assert "".join(delta["custom"]["input"] for delta in deltas) == call.custom.input
