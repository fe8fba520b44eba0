"""Every field of the client's own signatures, and vLLM's: each works, or is refused by its own name."""

import inspect
from typing import Any

import openai
import pytest
from tests.clients.either import settled
from tests.clients.endpoints import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")
OURS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
"""Parameters of the client itself, not of the API."""
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
COMMON: dict[str, list[Any]] = {
    "model": [MODEL],
    "frequency_penalty": [0.5],
    "logit_bias": [{"5": -10}],
    "n": [2],
    "presence_penalty": [-0.5],
    "seed": [3],
    "stop": ["x", ["x", "yz"]],
    "temperature": [0, 1.5],
    "top_p": [0.5],
    "user": ["anna"],
}
CHAT: dict[str, list[Any]] = COMMON | {
    "messages": [[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello."}]],
    "audio": [{"format": "wav", "voice": "alloy"}],
    "function_call": ["none"],
    "functions": [[{"name": "f", "parameters": {"type": "object", "properties": {}}}]],
    "logprobs": [True],
    "max_completion_tokens": [2],
    "max_tokens": [2],
    "metadata": [{"team": "sea"}],
    "modalities": [["text"], ["text", "audio"]],
    "moderation": [{"model": "omni-moderation-latest"}],
    "parallel_tool_calls": [True],
    "prediction": [{"type": "content", "content": "Hello."}],
    "prompt_cache_key": ["a"],
    "prompt_cache_options": [{}],
    "prompt_cache_retention": ["24h"],
    "reasoning_effort": ["low"],
    "response_format": [{"type": "text"}],
    "safety_identifier": ["a"],
    "service_tier": ["auto", "priority"],
    "store": [False, True],
    "stream": [False],
    "stream_options": [{"include_usage": True}],
    "tool_choice": ["none", "auto"],
    "tools": [[WEATHER]],
    "top_logprobs": [2],
    "verbosity": ["low"],
    "web_search_options": [{}],
}
TEXT: dict[str, list[Any]] = COMMON | {
    "prompt": ["Hello", ["Hello", "there"], [5, 6], [[5, 6], [7]]],
    "best_of": [2],
    "echo": [True],
    "logprobs": [2],
    "max_tokens": [2],
    "stream": [False],
    "stream_options": [{"include_usage": True}],
    "suffix": ["the end"],
}
EXTRA: dict[str, list[Any]] = {
    "top_k": [5],
    "min_p": [0.1],
    "repetition_penalty": [1.2],
    "stop_token_ids": [[5]],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True],
    "min_tokens": [1],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "prompt_logprobs": [1],
    "allowed_token_ids": [[300, 301]],
    "bad_words": [["the"]],
    "priority": [1],
    "cache_salt": ["mine"],
    "request_id": ["abc"],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "truncate_prompt_tokens": [4],
    "structured_outputs": [{"choice": ["a", "b"]}],
}
EXTRA_CHAT: dict[str, list[Any]] = EXTRA | {
    "echo": [True],
    "chat_template": ["{{ messages[0].content }}"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "add_generation_prompt": [False],
    "continue_final_message": [False],
    "documents": [[{"title": "a", "text": "b"}]],
    "include_reasoning": [True],
}
NEEDS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [WEATHER]},
    "parallel_tool_calls": {"tools": [WEATHER]},
    "stream_options": {"stream": True},
}
"""Fields that have a meaning only beside others."""


def fields_of(create: Any) -> set[str]:
    return set(inspect.signature(create).parameters) - OURS


async def faults(create: Any, base: dict[str, Any], values: dict[str, list[Any]], extra: bool) -> list[str]:
    """Return the fields that neither worked nor were refused by name."""
    wrong = []
    known = values.keys() if extra else fields_of(create)  # an older client lacks some of them
    assert known <= values.keys(), "a newer client's fields need a value here"
    for field, tried in values.items():
        if field not in known:
            continue
        for value in tried:
            given = {"extra_body": {field: value}} if extra else {field: value}
            try:
                answer = await settled(create(**base | NEEDS.get(field, {}) | given))
                if NEEDS.get(field, {}).get("stream"):
                    await settled(answer.close())
            except openai.BadRequestError as error:
                if error.param is None or error.param.partition(".")[0].partition("[")[0] != field:
                    wrong.append(f"{field}={value!r}: refused in the name of {error.param}: {error.message}")
            except openai.APIError as error:
                wrong.append(f"{field}={value!r}: {error!r}")
    return wrong


async def test_every_chat_field_works_or_is_refused_by_name(api: Any) -> None:
    base = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_completion_tokens": 2}
    assert not await faults(api.chat.completions.create, base, CHAT, extra=False)
    assert not await faults(api.chat.completions.create, base, EXTRA_CHAT, extra=True)


async def test_every_completions_field_works_or_is_refused_by_name(api: Any) -> None:
    base = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
    assert not await faults(api.completions.create, base, TEXT, extra=False)
    assert not await faults(api.completions.create, base, EXTRA, extra=True)
