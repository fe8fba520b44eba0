"""The price of reading a body in a thread covers its CPU time, also of what is not counted in it."""

import json
from time import thread_time

import pytest
from tests.router.harness import Fleet

from fairlead_common.json_size import check_json
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_common.protocols.paths import CHAT, MESSAGES, RESPONSES
from fairlead_router.request.parser_pool import ParserProcess
from fairlead_router.request.price import MICROSECONDS_A_TOKEN
from fairlead_router.request.prompts import THREAD_OBJECTS
from fairlead_router.tenancy.tenants import ANONYMOUS


async def test_arguments_of_tool_calls_are_paid_also_where_their_prompt_is_refused(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    call = {"type": "function", "id": "x", "function": {"name": "f", "arguments": json.dumps({"list": [{}] * 15_000})}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": 5}]
    raw = json.dumps({"messages": messages}).encode()
    size = check_json(raw, 0, THREAD_OBJECTS)
    assert size.objects < 30, "the arguments are one text"
    began = thread_time()
    prompt = router.server.router.prompts._read(CHAT, raw, ANONYMOUS, "", size)
    assert prompt.tokens is None
    assert 0.8 * (thread_time() - began) <= 1e-6 * MICROSECONDS_A_TOKEN * prompt.price


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": [{"type": "zzz"}] * 1500}),
        (RESPONSES, {"input": "x", "tools": [{"type": "custom", "name": "a"}] * 1000}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "zzz"}] * 900}]}),
    ],
)
async def test_the_conversion_of_other_protocols_is_paid(fleet: Fleet, path: str, body: dict[str, object]) -> None:
    router = await fleet.router(await fleet.worker())
    raw = json.dumps(body).encode()
    size = check_json(raw, 0, THREAD_OBJECTS)
    began = thread_time()
    prompt = router.server.router.prompts._read(path, raw, ANONYMOUS, "", size)
    assert 0.8 * (thread_time() - began) <= 1e-6 * MICROSECONDS_A_TOKEN * prompt.price


def test_freeing_a_large_body_is_paid() -> None:
    process = ParserProcess(TokenCache(1 << 20))
    raw = json.dumps({"messages": [{"content": "x"}] * 20_000}).encode()
    process.read(CHAT, raw, "", False, 1 << 20)
    assert process.take_cpu_seconds() > 0
    process.finish()
    assert process.take_cpu_seconds() > 0
    process.close()
