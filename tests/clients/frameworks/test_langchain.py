"""LangChain over chat completions, responses, messages and embeddings."""

from typing import Any, Literal

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from tests.clients.endpoints import MODEL

ASKED = "What is the weather in Oslo?"


@tool
def weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather in a city."""
    return f"sun over {city} for {days} days"


class Report(BaseModel):
    city: Literal["Oslo", "Rome"]
    cold: bool


@pytest.fixture(scope="module")
def llm(url: str) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, max_completion_tokens=300, seed=3)


def gathered(stream: Any) -> Any:
    whole = None
    for part in stream:
        whole = part if whole is None else whole + part
    return whole


async def agathered(stream: Any) -> Any:
    whole = None
    async for part in stream:
        whole = part if whole is None else whole + part
    return whole


def test_a_streamed_conversation_with_a_tool(llm: ChatOpenAI) -> None:
    messages: list[Any] = [HumanMessage(ASKED)]
    call = gathered(llm.bind_tools([weather], tool_choice="required").stream(messages))
    assert len(call.tool_call_chunks) >= 1 and not call.invalid_tool_calls
    assert call.response_metadata["finish_reason"] == "tool_calls"
    messages += [call, *(weather.invoke(each) for each in call.tool_calls)]
    assert isinstance(messages[-1], ToolMessage) and messages[-1].content.startswith("sun over")
    answer = gathered(llm.bind_tools([weather], tool_choice="none").stream([*messages, HumanMessage("In a word?")], stream_usage=True))
    assert answer.content and not answer.tool_calls and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


async def test_an_async_conversation_with_a_named_tool(llm: ChatOpenAI) -> None:
    named = llm.bind_tools([weather], tool_choice="weather", strict=True)
    whole = await named.ainvoke(ASKED)
    streamed = await agathered(named.astream(ASKED))
    assert isinstance(whole, AIMessage) and whole.tool_calls[0]["name"] == "weather"
    assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in whole.tool_calls]
    result = await weather.ainvoke(whole.tool_calls[0])
    answer = await agathered(llm.astream([HumanMessage(ASKED), whole, result]))
    assert answer.content


def test_concurrent_requests(llm: ChatOpenAI) -> None:
    first, second = llm.batch(["One.", "Two."])
    assert first.content and second.content and first.usage_metadata is not None
    assert first.usage_metadata["total_tokens"] == first.usage_metadata["input_tokens"] + first.usage_metadata["output_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(llm: ChatOpenAI, method: Any) -> None:
    report = llm.with_structured_output(Report, method=method).invoke(ASKED)
    assert isinstance(report, Report)
    *_, last = llm.with_structured_output(Report, method=method).stream(ASKED)
    assert last == report


def test_embeddings(url: str) -> None:
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, check_embedding_ctx_length=False)
    many = embeddings.embed_documents(["a ring", "a rope"])
    assert len(many) == 2 and many[0] == pytest.approx(embeddings.embed_query("a ring"), abs=1e-3)


def test_responses(url: str) -> None:
    endless = {"ignore_eos": True}
    llm = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, max_tokens=40, use_responses_api=True, extra_body=endless
    )
    assert llm.invoke(ASKED).text and gathered(llm.stream(ASKED)).text


def test_a_conversation_with_a_tool_over_messages(url: str) -> None:
    llm = ChatAnthropic(model=MODEL, base_url=url, api_key="none", max_retries=0, max_tokens=300)
    call = gathered(llm.bind_tools([weather], tool_choice="any").stream(ASKED))
    assert call.tool_calls and call.tool_calls[0]["name"] == "weather"
    results = [weather.invoke(each) for each in call.tool_calls]
    answer = gathered(llm.bind_tools([weather]).stream([HumanMessage(ASKED), call, *results]))
    assert answer.text or answer.tool_calls
