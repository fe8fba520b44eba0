"""Tools with openai's client: every `tool_choice`, streamed arguments, and calls parsed into pydantic models."""

import json
from typing import Any, Literal

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from tests.clients.either import all_of, each, opened, settled
from tests.clients.endpoints import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


class Clock(BaseModel):
    """The time in a zone."""

    zone: Literal["UTC", "CET"]


TOOLS = [pydantic_function_tool(Weather), pydantic_function_tool(Clock, name="clock")]
QUESTION: dict[str, Any] = {"role": "user", "content": "What is the weather in Oslo?"}
ASKED: dict[str, Any] = {"model": MODEL, "messages": [QUESTION], "tools": TOOLS, "seed": 3, "max_completion_tokens": 400}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "Weather"}}


def checked(call: Any) -> None:
    assert call.type == "function" and call.id
    kind = {"Weather": Weather, "clock": Clock}[call.function.name]
    kind.model_validate_json(call.function.arguments)


async def test_automatic_choice_and_none(api: Any) -> None:
    for choice in ("none", "auto"):
        answer = await settled(api.chat.completions.create(**ASKED, tool_choice=choice, n=2))
        for each_choice in answer.choices:
            if choice == "none":
                assert each_choice.message.tool_calls is None and each_choice.finish_reason in ("stop", "length")
            for call in each_choice.message.tool_calls or ():
                checked(call)


@pytest.mark.parametrize("choice", ["required", WEATHER], ids=["required", "named"])
async def test_a_forced_call_is_the_same_whole_and_streamed(api: Any, choice: Any) -> None:
    asked = ASKED | {"tool_choice": choice, "parallel_tool_calls": False}
    whole = (await settled(api.chat.completions.create(**asked))).choices[0]
    (call,) = whole.message.tool_calls
    checked(call)
    assert whole.finish_reason == "tool_calls" and not whole.message.content
    if choice is WEATHER:
        assert call.function.name == "Weather"
    chunks = await all_of(await settled(api.chat.completions.create(**asked, stream=True)))
    parts = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    assert parts[0].id and parts[0].function.name == call.function.name and parts[0].type == "function"
    assert {part.index for part in parts} == {0} and not any(part.id or part.function.name for part in parts[1:])
    assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "tool_calls"


async def test_calls_are_parsed_into_models(api: Any) -> None:
    asked = ASKED | {"tool_choice": WEATHER}
    answer = await settled(api.chat.completions.parse(**asked))
    (call, *_) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    done = []
    async with opened(api.chat.completions.stream(**asked)) as stream:
        async for event in each(stream):
            if event.type == "tool_calls.function.arguments.done":
                done.append(event.parsed_arguments)
        final = await settled(stream.get_final_completion())
    assert done[0] == call.function.parsed_arguments == final.choices[0].message.tool_calls[0].function.parsed_arguments


async def test_a_streamed_conversation(api: Any) -> None:
    async with opened(api.chat.completions.stream(**ASKED, tool_choice="required")) as stream:
        message = (await settled(stream.get_final_completion())).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 21})} for call in message.tool_calls]
    talk = [
        QUESTION,
        message.model_dump(exclude_none=True, exclude={"tool_calls": {"__all__": {"function": {"parsed_arguments"}}}}),
        *results,
    ]
    asked = ASKED | {"messages": talk, "tool_choice": "none", "stream": True, "stream_options": {"include_usage": True}}
    *parts, last = await all_of(await settled(api.chat.completions.create(**asked)))
    assert "".join(choice.delta.content or "" for chunk in parts for choice in chunk.choices)
    assert last.usage is not None and last.usage.prompt_tokens > 60


async def test_a_truncated_call_finishes_with_length(api: Any) -> None:
    answer = await settled(api.chat.completions.create(**ASKED | {"max_completion_tokens": 3}, tool_choice="required"))
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ],
    ids=["nobody", "perhaps", "nameless"],
)
async def test_invalid_tool_fields_are_named(api: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await settled(api.chat.completions.create(**ASKED | options))
    assert refused.value.param is not None and refused.value.param.startswith(param)
