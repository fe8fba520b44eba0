"""Strict response validation of openai's client where the model reasons, through worker and router."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.clients.deployment import TEMPLATE, deployed
from tests.clients.endpoints import MODEL, Endpoints

THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
"""The random model never ends its reasoning, so that answers have nothing else."""


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    template = TEMPLATE + "{%- if enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
    with deployed(tmp_path_factory.mktemp("reasoning"), template) as running:
        yield running


@pytest.fixture(params=["worker", "router"])
def api(request: pytest.FixtureRequest, endpoints: Endpoints) -> Iterator[openai.OpenAI]:
    url = f"{getattr(endpoints, request.param)}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True) as client:
        yield client


def test_a_chat(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me of the sea."}], "max_completion_tokens": 24}
    asked |= {"temperature": 0, "logprobs": True, "top_logprobs": 2, "extra_body": THINKING}
    whole = api.chat.completions.create(**asked)
    thought, usage = whole.choices[0].message.reasoning_content, whole.usage
    assert thought and usage.completion_tokens_details.reasoning_tokens > 0
    *chunks, last = api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == thought
    assert last.usage.completion_tokens_details == usage.completion_tokens_details


def test_a_stored_response(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Tell me of the sea.", "max_output_tokens": 24, "temperature": 0}
    whole = api.responses.create(**asked, extra_body=THINKING, store=True)
    assert [item.type for item in whole.output] == ["reasoning"] and whole.usage.output_tokens_details.reasoning_tokens > 0
    *events, last = api.responses.create(**asked, extra_body=THINKING, store=True, stream=True)
    assert last.type == "response.incomplete"
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == whole.output[0].content[0].text == last.response.output[0].content[0].text
    for id in (whole.id, last.response.id):
        assert [item.type for item in api.responses.retrieve(id).output] == ["reasoning"]
        api.responses.delete(id)
