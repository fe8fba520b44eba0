"""Strict response validation of openai's client: an answer with a field that its types do not allow is an error.

The fixture `api` validates strictly, so the other suites check their answers too. Here are the answers that they lack, and the three that
OpenAI's own types do not allow: they follow OpenAI's API, not its types.
"""

from typing import Any

import openai
import pytest
from pydantic import ValidationError
from tests.clients.either import all_of, each, settled
from tests.clients.endpoints import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 5, "max_completion_tokens": 200, "logprobs": True, "top_logprobs": 2}
ASKED: dict[str, Any] = {"model": MODEL, "input": "Tell me of the sea.", "max_output_tokens": 24, "temperature": 0}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "The quick brown fox", "seed": 5, "max_tokens": 8, "logprobs": 2}
COMPLETION |= {"extra_body": {"ignore_eos": True}}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


async def test_the_client_refuses_an_answer_of_another_type(api: Any) -> None:
    with pytest.raises(openai.APIResponseValidationError):
        await settled(api.get("/models", cast_to=openai.types.Completion))


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
async def test_a_chat_with_tools_and_logprobs(api: Any, choice: str) -> None:
    asked = CHAT | {"tools": [CHAT_TOOL], "tool_choice": choice, "n": 2}
    whole = await settled(api.chat.completions.create(**asked))
    chunks = await all_of(await settled(api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})))
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    called = any(each.delta.tool_calls for chunk in chunks for each in chunk.choices)
    assert called == any(each.message.tool_calls for each in whole.choices) and (called or choice != "required")


@pytest.mark.parametrize(
    "options",
    [LOGPROBS, {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 200}],
    ids=["logprobs", "tools"],
)
async def test_a_response_is_stored_retrieved_and_deleted(api: Any, options: dict[str, Any]) -> None:
    made = await settled(api.responses.create(**ASKED | options, store=True))
    *_, last = await all_of(await settled(api.responses.create(**ASKED | options, store=True, stream=True)))
    assert [item.type for item in last.response.output] == [item.type for item in made.output]
    assert made.output[0].type == ("function_call" if "tools" in options else "message")
    for id in (made.id, last.response.id):
        stored = await settled(api.responses.retrieve(id))
        assert stored.id == id and stored.usage.total_tokens == made.usage.total_tokens
        assert [item.type async for item in each(api.responses.input_items.list(id))]
        await settled(api.responses.delete(id))
        with pytest.raises(openai.NotFoundError):
            await settled(api.responses.retrieve(id))


async def test_completions_embeddings_and_models(api: Any) -> None:
    completion = await settled(api.completions.create(**COMPLETION, n=2))
    assert [len(choice.logprobs.tokens) for choice in completion.choices] == [8, 8]
    answer = await settled(api.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float"))
    assert [entry.index for entry in answer.data] == [0, 1]
    names = [model.id async for model in each(api.models.list())]
    assert (await settled(api.models.retrieve(names[0]))).id == names[0]


async def test_a_completions_nulls_are_those_of_openai(lenient: Any) -> None:
    """Chunks before the last have no finish reason, and the first token of an echoed prompt has no probability."""
    chunks = await all_of(await settled(lenient.completions.create(**COMPLETION, stream=True, stream_options={"include_usage": True})))
    assert len(chunks) > 2
    for chunk in chunks:
        running = any(choice.finish_reason is None for choice in chunk.choices)
        assert find_invalid(chunk) == ({"choices.0.finish_reason": None} if running else {})
    echoed = await settled(lenient.completions.create(**COMPLETION, echo=True))
    first = {"choices.0.logprobs.token_logprobs.0": None, "choices.0.logprobs.top_logprobs.0": None}
    assert find_invalid(echoed) == first


async def test_embeddings_in_base64_are_valid_once_decoded(lenient: Any) -> None:
    """The client requests base64 by default. It validates before it decodes, and so refuses the form that it asked for."""
    assert find_invalid(await settled(lenient.embeddings.create(model=MODEL, input=["a", "b"]))) == {}


def find_invalid(answer: Any) -> dict[str, Any]:
    """Return the values that the answer's type does not allow, by their path."""
    try:
        type(answer).model_validate(answer.to_dict())
    except ValidationError as invalid:
        return {".".join(map(str, error["loc"])): error["input"] for error in invalid.errors()}
    return {}
