"""LiteLLM's library with both provider names that its users choose for a server like this one."""

import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel
from tests.clients.endpoints import MODEL

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


class Report(BaseModel):
    city: str
    cold: bool


@pytest.fixture(scope="module", params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "timeout": 60,
        "max_tokens": 300,
        "seed": 3,
    }


def answered(asked: Any) -> list[Any]:
    """Return the conversation so far: the calls, and a result for each."""
    message = asked.choices[0].message
    assert asked.choices[0].finish_reason == "tool_calls" and message.tool_calls
    talk: list[Any] = [*ASKED, message.model_dump(exclude_none=True)]
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather" and arguments["city"] in ("Oslo", "Rome")
        talk.append({"role": "tool", "tool_call_id": call.id, "content": f"sun over {arguments['city']}"})
    return talk


def test_a_streamed_conversation_with_a_tool(options: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**options, messages=ASKED, tools=[TOOL], tool_choice="required", stream=True))
    talk = answered(litellm.stream_chunk_builder(chunks, messages=ASKED))
    parts = list(
        litellm.completion(**options, messages=talk, tools=[TOOL], tool_choice="none", stream=True, stream_options={"include_usage": True})
    )
    answer: Any = litellm.stream_chunk_builder(parts, messages=talk)
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
    assert answer.usage.completion_tokens > 0 and answer.usage.prompt_tokens > 20


async def test_an_async_conversation_with_a_tool(options: dict[str, Any]) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    talk = answered(await litellm.acompletion(**options, messages=ASKED, tools=[TOOL], tool_choice=named))
    text = ""
    async for part in await litellm.acompletion(**options, messages=talk, stream=True):
        text += part.choices[0].delta.content or ""
    assert text


def test_structured_output_and_errors(options: dict[str, Any]) -> None:
    answer: Any = litellm.completion(**options, messages=ASKED, response_format=Report)
    assert Report.model_validate_json(answer.choices[0].message.content)
    with pytest.raises(litellm.exceptions.BadRequestError):
        litellm.completion(**options | {"temperature": 9}, messages=ASKED)
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.completion(**options | {"model": options["model"].replace(MODEL, "nobody")}, messages=ASKED)


def test_text_completions(options: dict[str, Any]) -> None:
    whole: Any = litellm.text_completion(**options, prompt="The sea")
    assert whole.choices[0].text


def test_embeddings(options: dict[str, Any]) -> None:
    answer: Any = litellm.embedding(**{name: options[name] for name in ("model", "api_base", "api_key")}, input=["a ring", "a rope"])
    assert [len(each["embedding"]) for each in answer.data] == [64, 64] and answer.usage.prompt_tokens > 2
