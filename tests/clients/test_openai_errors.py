"""Every refusal becomes the exception that the client's users catch, with the field's name in it."""

import asyncio
import re
from typing import Any

import httpx
import openai
import pytest
from tests.clients.either import settled
from tests.clients.endpoints import KEY, MODEL, POOR_KEY, Endpoints
from tests.worker.api.process import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_completion_tokens": 4}


async def chat(api: Any, **options: Any) -> Any:
    return await settled(api.chat.completions.create(**CHAT | options))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"seed": "one"}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"extra_body": {"top_k": -5}}, "top_k"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
async def test_an_invalid_field_is_named(api: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(api, **options)
    error = refused.value
    assert error.param is not None and re.split(r"[.\[]", error.param)[0] == param, (error.param, error.message)
    assert error.type == "invalid_request_error" and param in error.message
    assert error.request_id


async def test_unknown_models_and_paths_raise_not_found(api: Any) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await chat(api, model="gpt-9")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model") and "gpt-9" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        await settled(api.images.generate(prompt="a boat", model=MODEL))


async def test_a_prompt_beyond_the_context(api: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await settled(api.completions.create(model=MODEL, prompt="word " * 5000, max_tokens=4))
    assert refused.value.code == "context_length_exceeded" and "4096" in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(api, max_completion_tokens=100_000)
    assert refused.value.code == "context_length_exceeded"


async def test_a_body_beyond_the_limit(api: Any) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        await settled(api.completions.create(model=MODEL, prompt="x" * (9 << 20), max_tokens=1))
    assert refused.value.status_code == 413


async def test_an_error_before_a_stream_is_no_stream(api: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        await chat(api, stream=True, temperature=9)


async def test_a_request_that_timed_out_at_the_client_is_no_longer_served(api: Any, deployment: Endpoints) -> None:
    with pytest.raises(openai.APITimeoutError):
        await chat(api, max_completion_tokens=4000, extra_body={"ignore_eos": True}, timeout=0.5)
    until(lambda: deployment.running() == 0, "the sequence is dropped", seconds=60)


async def test_a_cancelled_task_is_no_longer_served(url: str, deployment: Endpoints) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        asked = asyncio.ensure_future(chat(api, max_completion_tokens=4000, extra_body={"ignore_eos": True}))
        async with httpx.AsyncClient() as looking:
            while not (await looking.get(f"{deployment.worker}/load")).json()["running"]:
                assert not asked.done()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    until(lambda: deployment.running() == 0, "the sequence is dropped", seconds=60)


@pytest.mark.parametrize("kind", [openai.OpenAI, openai.AsyncOpenAI], ids=["sync", "async"])
async def test_missing_keys_and_exceeded_rates_raise_openais_exceptions(kind: Any, deployment: Endpoints) -> None:
    def client(key: str, base: str = deployment.guarded) -> Any:
        return kind(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=60)

    clients = [client("fl-of-nobody"), client(KEY), client(POOR_KEY), client("none", deployment.forsaken)]
    stranger, rich, poor, forsaken = clients
    with pytest.raises(openai.AuthenticationError) as refused:
        await chat(stranger)
    assert refused.value.code == "invalid_api_key"
    raw = await settled(rich.chat.completions.with_raw_response.create(**CHAT))
    assert raw.status_code == 200
    with pytest.raises(openai.RateLimitError) as limited:
        for _ in range(3):  # a full bucket admits the first request, which leaves it in debt
            await chat(poor)
    assert int(limited.value.response.headers["retry-after"]) > 0 and limited.value.type
    with pytest.raises(openai.InternalServerError) as away:
        await chat(forsaken)
    assert away.value.status_code == 503 and int(away.value.response.headers["retry-after"]) > 0
    for each in clients:
        await settled(each.close())
    with pytest.raises(openai.APIConnectionError):
        await chat(client("none", "http://127.0.0.1:1"))
