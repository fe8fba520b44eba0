"""LlamaIndex's OpenAILike, which its users take for servers with OpenAI's API."""

from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from tests.clients.endpoints import MODEL

ASKED = "What is the weather in Oslo?"


def weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather in a city."""
    return f"sun over {city} for {days} days"


TOOL = FunctionTool.from_defaults(weather)


class Report(BaseModel):
    """What is told of a city."""

    city: Literal["Oslo", "Rome"]
    cold: bool


@pytest.fixture(scope="module")
def llm(url: str) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_tokens=300,
        max_retries=0,
        temperature=1.0,
        additional_kwargs={"seed": 3},
    )


def result_of(call: Any) -> ChatMessage:
    said = TOOL(**call.tool_kwargs)
    return ChatMessage(role=MessageRole.TOOL, content=str(said), additional_kwargs={"tool_call_id": call.tool_id, "name": call.tool_name})


def test_a_streamed_conversation_with_a_tool(llm: OpenAILike) -> None:
    *_, asked = llm.stream_chat_with_tools([TOOL], user_msg=ASKED, chat_history=[], tool_required=True)
    calls = llm.get_tool_calls_from_response(asked)
    assert calls and calls[0].tool_name == "weather" and calls[0].tool_kwargs["city"] in ("Oslo", "Rome")
    history = [ChatMessage(role=MessageRole.USER, content=ASKED), asked.message, *(result_of(call) for call in calls)]
    parts = list(llm.stream_chat(history))
    assert "".join(part.delta or "" for part in parts) == parts[-1].message.content != ""


async def test_an_async_conversation_with_a_tool(llm: OpenAILike) -> None:
    asked = await llm.achat_with_tools([TOOL], user_msg=ASKED, chat_history=[], tool_required=True)
    (call, *_) = llm.get_tool_calls_from_response(asked)
    last = None
    async for part in await llm.astream_chat([ChatMessage(role=MessageRole.USER, content=ASKED), asked.message, result_of(call)]):
        last = part
    assert last is not None and last.message.content


def test_text_completions(llm: OpenAILike) -> None:
    assert llm.complete("The sea").text
    assert "".join(part.delta or "" for part in llm.stream_complete("The sea"))


def test_structured_output(llm: OpenAILike) -> None:
    report = llm.structured_predict(Report, PromptTemplate("Tell of {city}."), city="Oslo")
    assert isinstance(report, Report)


def test_embeddings(url: str) -> None:
    embeddings = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="none", max_retries=0)
    many = embeddings.get_text_embedding_batch(["a ring", "a rope"])
    assert len(many) == 2 and many[0] == pytest.approx(embeddings.get_text_embedding("a ring"), abs=1e-3)
