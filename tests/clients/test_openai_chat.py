"""`client.chat.completions`, blocking and asynchronous, through worker and router alike."""

from time import time
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.clients.either import all_of, each, opened, settled
from tests.clients.endpoints import MODEL, Endpoints
from tests.worker.api.process import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of the sea."}]
SEEDED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 5, "max_completion_tokens": 24}
ENDLESS: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 3000, "extra_body": {"ignore_eos": True}}


async def create(api: Any, **options: Any) -> ChatCompletion:
    answer = await settled(api.chat.completions.create(**SEEDED | options))
    assert isinstance(answer, ChatCompletion)
    return answer


async def streamed(api: Any, **options: Any) -> list[ChatCompletionChunk]:
    return await all_of(await settled(api.chat.completions.create(**SEEDED | options, stream=True)))


async def test_a_whole_answer(api: Any) -> None:
    answer = await create(api)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    assert abs(answer.created - time()) < 60
    (choice,) = answer.choices
    assert choice.index == 0 and choice.finish_reason in ("stop", "length") and choice.logprobs is None
    assert choice.message.role == "assistant" and choice.message.content and choice.message.refusal is None
    assert choice.message.tool_calls is None
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens > 10 and 0 < usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None


async def test_a_stream_adds_up_to_the_whole_answer(api: Any) -> None:
    whole = await create(api, n=2)
    chunks = await streamed(api, n=2, stream_options={"include_usage": True})
    texts, finished, seen = ["", ""], {}, set()
    *parts, last = chunks
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens and last.usage.prompt_tokens == whole.usage.prompt_tokens
    for chunk in parts:
        assert chunk.id == last.id and chunk.object == "chat.completion.chunk" and chunk.usage is None
        for choice in chunk.choices:
            assert choice.index not in finished, "a choice continues after its end"
            if choice.index not in seen:
                assert choice.delta.role == "assistant"
            seen.add(choice.index)
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finished[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices] and texts[0] != texts[1]
    assert finished == {choice.index: choice.finish_reason for choice in whole.choices}


async def test_usage_in_a_stream_follows_stream_options(api: Any) -> None:
    assert all(chunk.usage is None and chunk.choices for chunk in await streamed(api))
    counted = await streamed(api, extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    tokens = [chunk.usage.completion_tokens for chunk in counted if chunk.usage]
    assert len(tokens) == len(counted) and tokens == sorted(tokens) and tokens[-1] > 0


async def test_the_stream_helper_accumulates_the_whole_answer(api: Any) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stop": ["e", " "], "max_completion_tokens": 400}
    whole = await create(api, **asked)  # until a stop: the helper raises LengthFinishReasonError for a length, also for plain text
    kinds: list[str] = []
    options = SEEDED | asked | {"stream_options": {"include_usage": True}}
    async with opened(api.chat.completions.stream(**options)) as stream:
        async for event in each(stream):
            kinds.append(event.type)
            if event.type == "content.done":
                assert event.content == whole.choices[0].message.content
        final = await settled(stream.get_final_completion())
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= set(kinds)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.choices[0].logprobs.model_dump() == whole.choices[0].logprobs.model_dump()  # type: ignore[union-attr]
    assert final.usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


async def test_logprobs_have_openais_form(api: Any) -> None:
    answer = await create(api, logprobs=True, top_logprobs=3, temperature=0, n=2)
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content and choice.logprobs.refusal is None
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0 and len(entry.top_logprobs) == 3 and entry.bytes is not None
            assert entry.top_logprobs[0].logprob == entry.logprob and entry.top_logprobs[0].token == entry.token
        joined = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
        assert joined.decode(errors="replace").startswith((choice.message.content or "")[:8])
    bare = await create(api, logprobs=True)
    assert bare.choices[0].logprobs is not None and bare.choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in bare.choices[0].logprobs.content)


async def test_a_seed_repeats_an_answer_and_choices_differ(api: Any) -> None:
    one, again, other = await create(api), await create(api), await create(api, seed=6)
    assert one.choices[0].message.content == again.choices[0].message.content != other.choices[0].message.content
    many = await create(api, n=3)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert many.choices[0].message.content == one.choices[0].message.content
    assert len({choice.message.content for choice in many.choices}) == 3


async def test_an_answer_ends_at_a_stop_string(api: Any) -> None:
    free = (await create(api, extra_body={"ignore_eos": True})).choices[0]
    assert free.finish_reason == "length"
    text = free.message.content or ""
    stop = next(text[at : at + 3] for at in range(len(text) // 2, len(text)) if text[at : at + 3].isascii())
    for given in (stop, ["never said", stop]):
        cut = (await create(api, extra_body={"ignore_eos": True}, stop=given)).choices[0]
        assert (cut.finish_reason, cut.message.content) == ("stop", text[: text.index(stop)])
        assert cut.stop_reason == stop, "vLLM's field, which the client keeps"  # type: ignore[attr-defined]
    for field in ("max_tokens", "max_completion_tokens"):
        short = await create(api, **{"max_completion_tokens": None, field: 3}, extra_body={"ignore_eos": True})
        assert short.choices[0].finish_reason == "length" and short.usage is not None and short.usage.completion_tokens == 3


async def test_sampling_fields_change_the_sampled_tokens(api: Any) -> None:
    greedy = [(await create(api, temperature=0, seed=seed)).choices[0].message.content for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    assert (await create(api, top_p=0.001, seed=3)).choices[0].message.content == greedy[0]
    forced = await create(api, logit_bias={"300": 100}, temperature=0, max_completion_tokens=4, logprobs=True)
    assert forced.choices[0].logprobs is not None and forced.choices[0].logprobs.content
    assert len({entry.token for entry in forced.choices[0].logprobs.content}) == 1
    spread = await create(api, temperature=0, presence_penalty=2, frequency_penalty=2, logit_bias={"300": 3}, max_completion_tokens=64)
    assert spread.choices[0].message.content != (await create(api, temperature=0, max_completion_tokens=64)).choices[0].message.content


async def test_messages_in_every_form_of_their_type(api: Any) -> None:
    plain = await create(api, temperature=0)
    parts: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "of the sea."}], "name": "anna"},
    ]
    divided = await create(api, temperature=0, messages=parts)
    assert divided.usage is not None and plain.usage is not None and divided.usage.prompt_tokens >= plain.usage.prompt_tokens
    talk = [*MESSAGES, plain.choices[0].message, {"role": "user", "content": "Go on."}]
    longer = await create(api, messages=talk)
    assert longer.usage is not None and longer.usage.prompt_tokens > plain.usage.prompt_tokens


async def test_headers_name_the_request_and_its_pod(api: Any) -> None:
    raw = await settled(api.chat.completions.with_raw_response.create(**SEEDED, extra_headers={"X-Request-Id": "my-own-id"}))
    answer = await settled(raw.parse())
    assert isinstance(answer, ChatCompletion) and raw.status_code == 200
    assert raw.headers["x-request-id"] == raw.request_id == "my-own-id" and answer.id == "chatcmpl-my-own-id"
    assert raw.headers["x-fairlead-pod"] == "pod-0" and raw.headers["content-type"].startswith("application/json")
    assert (await create(api))._request_id
    async with opened(api.chat.completions.with_streaming_response.create(**SEEDED, stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in each(response.iter_lines())]
    assert [line for line in lines if line][-1] == "data: [DONE]"


async def test_a_client_that_leaves_a_stream_is_no_longer_served(api: Any, deployment: Endpoints) -> None:
    slow = {"n": 8, "logprobs": True, "top_logprobs": 20}  # so that it still runs when a busy machine asks
    stream = await settled(api.chat.completions.create(**ENDLESS, **slow, stream=True))
    seen = 0
    async for _ in each(stream):
        seen += 1
        if seen == 3:
            break
    until(lambda: deployment.running() == 8, "all its choices run", seconds=60)
    await settled(stream.close())
    until(lambda: deployment.running() == 0, "the sequence is dropped", seconds=60)
