"""`client.responses`, blocking and asynchronous, through worker and router alike: text, output formats and streams."""

from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from tests.clients.either import all_of, each, opened, settled
from tests.clients.endpoints import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASKED: dict[str, Any] = {"model": MODEL, "input": "Tell me of the sea.", "max_output_tokens": 24, "temperature": 0}


class Report(BaseModel):
    city: Literal["Oslo", "Rome"]
    cold: bool


async def create(api: Any, **options: Any) -> Response:
    answer = await settled(api.responses.create(**ASKED | options))
    assert isinstance(answer, Response)
    return answer


async def test_a_whole_answer(api: Any) -> None:
    answer = await create(api, instructions="Be brief.", metadata={"team": "sea"})
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.model == MODEL and answer.error is None
    assert answer.status in ("completed", "incomplete") and answer.output_text
    (message,) = answer.output
    assert message.type == "message" and message.role == "assistant" and message.content[0].type == "output_text"
    if answer.status == "incomplete":
        assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens >= 0 and answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.store is False, "the client's type has no such field"  # type: ignore[attr-defined]
    assert answer.metadata == {"team": "sea"} and answer.temperature == 0 and answer.instructions == "Be brief."


async def test_a_conversation_is_sent_completely(api: Any) -> None:
    one = await create(api)
    talk: list[Any] = [{"role": "user", "content": "Tell me of the sea."}, *one.output, {"role": "user", "content": "Go on."}]
    two = await create(api, input=talk)
    parts: list[Any] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Tell me of the sea."}]},
        {"role": "assistant", "content": one.output_text},
        {"role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ]
    again = await create(api, input=parts)
    assert two.usage is not None and one.usage is not None and two.usage.input_tokens > one.usage.input_tokens
    assert two.output_text == again.output_text


async def test_a_stream_adds_up_to_the_whole_answer(api: Any) -> None:
    asked = ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await create(api, **asked)
    events = await all_of(await settled(api.responses.create(**asked, stream=True)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] == f"response.{whole.status}"
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text and len(deltas) > 2
    final = events[-1].response
    shown = [entry.model_dump() for event in deltas for entry in event.logprobs]
    assert shown == [entry.model_dump() for entry in final.output[0].content[0].logprobs]
    assert all(len(entry.top_logprobs) == 2 for entry in whole.output[0].content[0].logprobs)  # type: ignore[union-attr]
    assert final.output_text == whole.output_text and final.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]


async def test_the_stream_helper_accumulates_the_answer(api: Any) -> None:
    # Structured output, so that the answer ends by itself: the helper accepts no other last event than `response.completed`.
    form = {"format": {"type": "json_schema", "name": "report", "schema": Report.model_json_schema()}}
    asked = ASKED | {"max_output_tokens": 200, "text": form}
    whole = await create(api, **asked)
    async with opened(api.responses.stream(**asked)) as stream:
        text = "".join([event.delta async for event in each(stream) if event.type == "response.output_text.delta"])
        final = await settled(stream.get_final_response())
    assert text == final.output_text == whole.output_text


async def test_a_pydantic_model_is_parsed(api: Any) -> None:
    asked = ASKED | {"max_output_tokens": 200}
    answer = await settled(api.responses.parse(**asked, text_format=Report))
    assert isinstance(answer.output_parsed, Report)
    async with opened(api.responses.stream(**asked, text_format=Report)) as stream:
        final = await settled(stream.get_final_response())
    assert final.output_parsed == answer.output_parsed


async def test_unsupported_operations_are_refused(api: Any) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await create(api, model="gpt-9")
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await settled(api.responses.retrieve("resp_1"))
