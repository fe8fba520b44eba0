"""Anthropic's client over messages, blocking and asynchronous, through worker and router alike."""

from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from tests.clients.either import all_of, each, opened, settled
from tests.clients.endpoints import KEY, MODEL, POOR_KEY, Endpoints
from tests.worker.api.process import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
SEA: Any = {"role": "user", "content": "Tell me of the sea."}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": [SEA], "extra_body": {"temperature": 0}}


async def create(claude: Any, **options: Any) -> Message:
    answer = await settled(claude.messages.create(**ASKED | options))
    assert isinstance(answer, Message)
    return answer


async def test_a_whole_answer(claude: Any) -> None:
    answer = await create(claude, system="Be brief.")
    assert answer.id.startswith("msg_") and (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    (block,) = answer.content
    assert block.type == "text" and block.text
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.stop_sequence is None
    assert answer.usage.input_tokens >= 0 and 0 < answer.usage.output_tokens <= 24
    assert answer._request_id, "from the header that Anthropic calls request-id"


async def test_a_conversation_in_every_content_form(claude: Any) -> None:
    blocks: Any = {"role": "user", "content": [{"type": "text", "text": "Tell me of the sea.", "cache_control": {"type": "ephemeral"}}]}
    one, same = await create(claude), await create(claude, messages=[blocks], system=[])
    assert one.content == same.content
    longer = await create(claude, messages=[SEA, {"role": "assistant", "content": one.content}, {"role": "user", "content": "Go on."}])
    assert longer.content
    begun = await create(claude, messages=[SEA, {"role": "assistant", "content": "The sea is"}])
    assert begun.content


async def test_a_stream_adds_up_to_the_whole_answer(claude: Any) -> None:
    whole = await create(claude)
    events = await all_of(await settled(claude.messages.create(**ASKED, stream=True)))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"] and set(kinds[2:-3]) == {"content_block_delta"}
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    (delta,) = [event for event in events if event.type == "message_delta"]
    assert text == whole.content[0].text and delta.delta.stop_reason == whole.stop_reason  # type: ignore[union-attr]
    assert delta.usage.output_tokens == whole.usage.output_tokens


async def test_the_stream_helper_accumulates_the_answer(claude: Any) -> None:
    whole = await create(claude)
    async with opened(claude.messages.stream(**ASKED)) as stream:
        text = "".join([part async for part in each(stream.text_stream)])
        final = await settled(stream.get_final_message())
    assert text == whole.content[0].text and final.content[0].text == text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens


async def test_stop_sequences_and_sampling(claude: Any) -> None:
    text = (await create(claude)).content[0].text  # type: ignore[union-attr]
    stop = next(text[at : at + 3] for at in range(len(text) // 2, len(text)) if text[at : at + 3].isascii())
    cut = await create(claude, stop_sequences=["never said", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in cut.content if block.type == "text") == text[: text.index(stop)]
    assert (await create(claude, extra_body={"temperature": 1, "top_p": 0.9, "top_k": 20})).content


async def test_tokens_are_counted_before_they_are_paid_for(claude: Any) -> None:
    asked = {name: ASKED[name] for name in ("model", "messages")}
    counted = await settled(claude.messages.count_tokens(**asked, system="Be brief."))
    answer = await create(claude, system="Be brief.")
    spent = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) + (answer.usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == spent > 10


async def test_an_answer_ends_at_the_end_of_the_context(claude: Any) -> None:
    """Claude Code asks for 32,000 tokens whatever the context is. The API refuses only a prompt that does not fit."""
    long = [{"role": "user", "content": "word " * 1250}]
    answer = await create(claude, messages=long, max_tokens=32_000, extra_body={"ignore_eos": True})
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) + answer.usage.output_tokens == 4096
    assert (await create(claude, max_tokens=2, extra_body={"ignore_eos": True})).stop_reason == "max_tokens"


async def test_invalid_requests_raise_anthropics_exceptions(claude: Any) -> None:
    for field, value in (("max_tokens", 0), ("temperature", 7), ("messages", []), ("messages", [{"role": "wizard", "content": "x"}])):
        with pytest.raises(anthropic.BadRequestError) as refused:
            await create(claude, extra_body={field: value})
        assert refused.value.type == "invalid_request_error" and field in str(refused.value)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await create(claude, model="claude-9")
    assert unknown.value.type == "not_found_error" and "claude-9" in str(unknown.value)
    with pytest.raises(anthropic.BadRequestError):
        await create(claude, messages=[{"role": "user", "content": "word " * 5000}])


async def test_a_client_that_disconnects_is_no_longer_served(claude: Any, deployment: Endpoints) -> None:
    stream = await settled(claude.messages.create(**ASKED | {"max_tokens": 3000}, stream=True))
    async for event in each(stream):
        if event.type == "content_block_delta":
            break
    await settled(stream.close())
    until(lambda: deployment.running() == 0, "the sequence is dropped", seconds=60)


@pytest.mark.parametrize("kind", [anthropic.Anthropic, anthropic.AsyncAnthropic], ids=["sync", "async"])
async def test_missing_keys_and_exceeded_rates_raise_anthropics_exceptions(kind: Any, deployment: Endpoints) -> None:
    def client(key: str, base: str = deployment.guarded) -> Any:
        return kind(base_url=base, api_key=key, max_retries=0, timeout=60)

    clients = [client("fl-of-nobody"), client(KEY), client(POOR_KEY), client("none", deployment.forsaken)]
    stranger, rich, poor, forsaken = clients
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await create(stranger)
    assert refused.value.type == "authentication_error"
    assert (await create(rich)).content
    assert (await settled(rich.messages.count_tokens(model=MODEL, messages=[SEA]))).input_tokens > 0
    with pytest.raises(anthropic.RateLimitError) as limited:
        for _ in range(3):
            await create(poor)
    assert limited.value.type == "rate_limit_error" and int(limited.value.response.headers["retry-after"]) > 0
    with pytest.raises(anthropic.APIStatusError) as away:
        await create(forsaken)
    assert away.value.status_code in (503, 529)
    for one in clients:
        await settled(one.close())
