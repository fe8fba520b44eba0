"""Anthropic's client on `/v1/messages` beyond plain text: blocks, output formats, tools, refusals, and the router's view of them."""

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message
from jsonschema import validate
from tests.clients.either import all_of, opened, settled
from tests.clients.endpoints import MODEL, Endpoints
from tests.router.harness import eventually

from fairlead_router.tenancy.charge import UsageMeter

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASKED: dict[str, Any] = {"model": MODEL, "system": "Be brief.", "messages": [{"role": "user", "content": "Tell me of the sea."}]}
SHORT: dict[str, Any] = {**ASKED, "max_tokens": 12, "extra_body": {"temperature": 0}}
BLOCK = 64  # tokens of a block of the index
WEATHER = {
    "name": "weather",
    "description": "The weather of a place",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["here", "there"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["place", "days"],
        "additionalProperties": False,
    },
}


async def create(claude: Any, **options: Any) -> Message:
    message = await settled(claude.messages.create(**SHORT | options))
    assert isinstance(message, Message)
    return message


async def test_the_assistants_last_message_is_continued(claude: Any) -> None:
    text = (await create(claude)).content[0].text  # type: ignore[union-attr]
    begun = [*ASKED["messages"], {"role": "assistant", "content": "The sea is"}]
    counted = await settled(claude.messages.count_tokens(**ASKED | {"messages": begun}))
    message = await create(claude, messages=begun)
    assert message.content[0].text != text  # type: ignore[union-attr]
    plain = await settled(claude.messages.count_tokens(**ASKED))
    assert counted.input_tokens > plain.input_tokens


async def test_content_blocks_of_a_conversation(claude: Any) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "And the weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": ""},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "here", "days": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Rain."}, {"type": "text", "text": "Well?"}]},
    ]
    message = await create(claude, messages=messages, tools=[WEATHER], metadata={"user_id": "anna"})
    assert message.content


async def test_structured_text(claude: Any) -> None:
    schema = {"type": "object", "properties": {"good": {"enum": [True]}}, "required": ["good"], "additionalProperties": False}
    message = await create(claude, max_tokens=60, output_config={"format": {"type": "json_schema", "schema": schema}})
    said = "".join(message.content[0].text.split())  # type: ignore[union-attr]
    assert said.startswith('{"good":true}'[: len(said)])


WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"extra_body": {"temperature": 2}}, "temperature:"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema:"),
    ({"tools": [WEB_SEARCH, {"name": "x", "input_schema": {"type": "array"}}]}, "tools[1].input_schema.type:"),
    ({"tools": [WEB_SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name:"),
    ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "tool_choice:"),
    ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name:"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name:"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type:"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens:"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type:"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role:"),
    ({"messages": []}, "messages:"),
    ({"stop_sequences": [""]}, "stop_sequences:"),
    ({"max_tokens": 0}, "max_tokens:"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "output_config.format.schema:"),
]


async def test_unsupported_fields_are_refused_by_name(claude: Any) -> None:
    for fields, start in REFUSALS:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await create(claude, **fields)
        body: Any = refused.value.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"].startswith(start), body


async def test_the_router_predicts_what_the_worker_has_cached(deployment: Endpoints) -> None:
    """The router tokenizes and hashes the prompt as the worker does, and sends the tokens along."""
    messages = [{"role": "user", "content": "Once more of the sea, and of the wind above it. " * 20}]
    bodies = {"/v1/messages": {"max_tokens": 2, "messages": messages}, "/v1/responses": {"max_output_tokens": 2, "input": messages}}
    async with httpx.AsyncClient(base_url=deployment.router, timeout=60) as client:
        for path, body in bodies.items():
            assert (await client.post(path, json=body)).status_code == 200

            async def known(path: str = path, body: Any = body) -> bool:
                answer = await client.post(path, json=body)
                predicted = int(answer.headers.get("x-fairlead-predicted-tokens", 0))
                cached = int(answer.headers["x-fairlead-cached-tokens"])  # an exact repeat: all but one; the index has blocks
                assert not predicted or 0 <= cached - predicted < BLOCK
                return predicted > 100

            await eventually(known, f"{path} is foretold")


async def test_a_stream_reports_its_usage_where_the_router_requests_it(deployment: Endpoints) -> None:
    asked = {
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "ignore_eos": True},
        "/v1/responses": {"max_output_tokens": 5, "input": "x", "ignore_eos": True},
    }
    async with httpx.AsyncClient(base_url=deployment.worker, timeout=60, headers={"x-fairlead-usage": "1"}) as client:
        for path, body in asked.items():
            meter = UsageMeter(0)
            meter.feed((await client.post(path, json=body | {"stream": True})).content)
            assert meter.is_exact and meter.output == 5 and meter.prompt > 5


async def test_a_forced_tool_is_called(claude: Any) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 200}
    whole = await create(claude, **options)
    (block,) = whole.content
    assert block.type == "tool_use" and block.name == "weather" and block.id and whole.stop_reason == "tool_use"
    validate(block.input, WEATHER["input_schema"])
    async with opened(claude.messages.stream(**SHORT | options)) as stream:
        events = await all_of(stream)
        final = await settled(stream.get_final_message())
    assert [(one.name, one.input) for one in final.content] == [("weather", block.input)] and final.stop_reason == "tool_use"
    assert json.loads("".join(event.partial_json for event in events if event.type == "input_json")) == block.input
    (anyone,) = (await create(claude, **options | {"tool_choice": {"type": "any"}})).content
    assert anyone.type == "tool_use"
