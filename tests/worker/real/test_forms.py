"""Forms and forced calls of a trained model: valid, sensible, and ended by the model itself, in schemas as people write them.

People leave objects open. A trained model uses that to go on until the token limit, which no random model shows.
"""

import json
from typing import Any

import jsonschema
import pytest
from tests.worker.api.process import WorkerProcess
from tests.worker.real.conftest import Chat

PET = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"],
}
PETS = {
    "type": "object",
    "properties": {
        "owner": {"type": "string"},
        "pets": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"$ref": "#/$defs/pet"}},
        "weights": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
    },
    "required": ["owner", "pets", "weights"],
    "$defs": {"pet": PET},
}


def function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)} if properties else None
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function("get_weather", "Weather of a city", city={"type": "string"}, unit={"enum": ["C", "F"]})
ADD = function("add", "Add two numbers", a={"type": "number"}, b={"type": "number"})
NOW = function("now", "The time of day")
TOOLS = [WEATHER, ADD, NOW]


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("question", "schema", "expected"),
    [
        ("Describe the cat Tom, who is 7 years old, as JSON.", PET, {"name": "Tom", "age": 7, "kind": "cat"}),
        ("Anna has a cat Tom, 7 years old, and a dog Rex, aged 3. Fill in the form as JSON.", PETS, {}),
    ],
    ids=["enum and number", "nested arrays and a reference"],
)
def test_a_form_is_valid_and_ends_by_itself(chat: Chat, question: str, schema: dict[str, Any], expected: dict[str, Any]) -> None:
    answer = chat.ask(question, response_format=form(schema), max_tokens=160)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    document = json.loads(choice["message"]["content"])
    jsonschema.validate(document, schema)
    assert expected.items() <= document.items() and document.keys() <= schema["properties"].keys()
    streamed = chat.stream(question, response_format=form(schema), max_tokens=160)
    assert "".join(each["delta"].get("content") or "" for each in streamed) == choice["message"]["content"]


@pytest.mark.parametrize(
    ("question", "fields", "tool"),
    [
        ("What is the weather in Paris in Celsius?", {"tool_choice": "required", "parallel_tool_calls": False}, WEATHER),
        ("What is 3 + 4?", {"tool_choice": "required", "parallel_tool_calls": False}, ADD),
        ("What is 3 + 4?", {"tool_choice": named("add")}, ADD),
        ("What time is it?", {"tool_choice": named("now")}, NOW),
    ],
    ids=["one of several", "numbers", "named", "without parameters"],
)
def test_a_forced_call_is_the_one_that_the_question_needs(chat: Chat, question: str, fields: dict[str, Any], tool: dict[str, Any]) -> None:
    """The chat template of this model drops tools: they are in the prompt all the same."""
    answer = chat.ask(question, tools=TOOLS, **fields)
    choice = answer["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    arguments, schema = json.loads(call["function"]["arguments"]), tool["function"]["parameters"]
    jsonschema.validate(arguments, (schema or {"properties": {}}) | {"additionalProperties": False})
    assert call["function"]["name"] == tool["function"]["name"] and (tool is not WEATHER or arguments["city"] == "Paris")
    streamed = chat.stream(question, tools=TOOLS, **fields)
    pieces = [each["function"] for choice in streamed for each in choice["delta"].get("tool_calls", ())]
    assert [piece["name"] for piece in pieces if "name" in piece] == [call["function"]["name"]]
    assert "".join(piece["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert streamed[-1]["finish_reason"] == "tool_calls"


def test_a_conversation_with_a_call_and_its_result(chat: Chat) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "C"}'}}
    answer = chat.ask(
        "What is the weather in Paris?",
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees, sunny"},
        tools=[WEATHER],
        max_tokens=40,
    )
    assert "21 degrees" in answer["choices"][0]["message"]["content"]


def test_the_other_protocols_force_the_same_call(worker: WorkerProcess) -> None:
    question, parameters = "What is the weather in Paris in Celsius?", WEATHER["function"]["parameters"]
    shared = {"name": "get_weather", "description": "Weather of a city"}
    messages = worker.post(
        "/v1/messages",
        messages=[{"role": "user", "content": question}],
        tools=[shared | {"input_schema": parameters}],
        tool_choice={"type": "any"},
        temperature=0,
        max_tokens=60,
    ).json()
    responses = worker.post(
        "/v1/responses",
        input=question,
        tools=[shared | {"type": "function", "parameters": parameters}],
        tool_choice="required",
        temperature=0,
        max_output_tokens=60,
    ).json()
    assert messages["stop_reason"] == "tool_use" and responses["status"] == "completed"
    assert messages["content"][0]["input"] == json.loads(responses["output"][0]["arguments"])
    assert messages["content"][0]["input"]["city"] == "Paris"
