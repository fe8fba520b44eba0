"""OpenAI's client on `/v1/responses` beyond plain text: items, log-probabilities, functions, refusals."""

import json
from typing import Any

import openai
import pytest
from jsonschema import validate
from openai.types.responses import Response
from tests.clients.either import all_of, settled
from tests.clients.endpoints import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASKED: dict[str, Any] = {"model": MODEL, "instructions": "Be brief.", "input": "Tell me of the sea."}
ASKED |= {"max_output_tokens": 12, "temperature": 0}
ARGUMENTS = '{"place": "here", "days": 1}'
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["here", "there"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["place", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}


async def create(api: Any, **options: Any) -> Response:
    response = await settled(api.responses.create(**ASKED | options))
    assert isinstance(response, Response)
    return response


async def streamed(api: Any, **options: Any) -> list[Any]:
    events = await all_of(await settled(api.responses.create(**ASKED | options, stream=True)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    return events


async def test_the_answer_equals_that_of_a_chat(api: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of the sea."}]
    chat = await settled(api.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=12, temperature=0))
    response = await create(api)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens


async def test_input_items_of_a_conversation(api: Any) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "input_text", "text": "And the weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I should look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "call_1", "output": "Rain."},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "Wet.", "annotations": []}]},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    response = await create(api, input=items, tools=[WEATHER])
    assert response.output_text
    chat = await settled(
        api.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": "Be brief.\nUse tools."},
                {"role": "user", "content": "And the weather?"},
                {
                    "role": "assistant",
                    "reasoning_content": "I should look.",
                    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
                {"role": "assistant", "content": "Wet."},
                {"role": "user", "content": "Thanks."},
            ],
            tools=[{"type": "function", "function": {name: WEATHER[name] for name in ("name", "description", "parameters", "strict")}}],
            max_completion_tokens=1,
        )
    )  # fmt: skip
    assert response.usage is not None and abs(response.usage.input_tokens - chat.usage.prompt_tokens) == 0


NAMESPACE = {"type": "namespace", "name": "sky", "description": "Weather", "tools": [WEATHER]}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    ({"tools": [NAMESPACE, {"type": "custom", "name": ""}]}, "tools[1].name"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format.schema"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"temperature": 3}, "temperature"),
    ({"input": "sea " * 5000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"extra_body": {"top_k": -7}}, "top_k"),
]


async def test_unsupported_fields_are_refused_by_name(api: Any) -> None:
    for fields, param in REFUSALS:
        with pytest.raises(openai.BadRequestError) as refused:
            await create(api, **fields)
        assert refused.value.param == param, refused.value
        assert refused.value.code == "context_length_exceeded" or refused.value.body["message"].startswith(f"{param}:")  # type: ignore[index,call-overload]


async def test_a_forced_function_is_called(api: Any) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 200}
    whole, events = await create(api, **options), await streamed(api, **options)
    (call,) = whole.output
    assert call.type == "function_call" and call.name == "weather" and call.call_id and whole.status == "completed"
    validate(json.loads(call.arguments), WEATHER["parameters"])
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (said,) = (event for event in events if event.type == "response.function_call_arguments.done")
    (last,) = events[-1].response.output
    assert deltas == said.arguments == last.arguments == call.arguments and events[-1].type == "response.completed"
    short = await create(api, **options | {"max_output_tokens": 2})
    assert short.status == "incomplete" and all(item.status == "incomplete" for item in short.output)  # type: ignore[union-attr]


async def test_no_function_is_called_where_tool_choice_forbids_it(api: Any) -> None:
    whole = await create(api, tools=[WEATHER], tool_choice="none", max_output_tokens=40)
    assert {item.type for item in whole.output} <= {"message", "reasoning"}
