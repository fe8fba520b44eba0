"""What a client sees through the router."""

import asyncio
import gzip
import json
from typing import Any

import msgspec
import pytest
from tests.router.harness import Fleet, eventually
from tests.router.prompt_format import encoded, make_format
from tests.router.stand_in_worker import Exchange

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_index.hashing import block_hashes, prompt_root


async def test_a_completion_is_proxied_both_ways_and_tokenized_once(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    answer = await router.complete("hi", max_tokens=3)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == " 0 1 2 3 4"
    (seen,) = worker.received
    assert len(seen.tokens) == 2 and seen.json == {"model": "stand-in", "prompt": "hi", "max_tokens": 3}
    assert answer.headers["x-fairlead-pod"] == "pod-0" and answer.headers["x-request-id"] == seen.headers["x-request-id"]


async def test_a_chat_is_rendered_with_the_models_template(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    await router.client.post("/v1/chat/completions", json={"model": "stand-in", "messages": [{"role": "user", "content": "yo"}]})
    assert len(worker.received[0].tokens) == len("<user>yo\n<assistant>")


async def test_a_chat_with_tools_is_tokenized_as_its_worker_would(fleet: Fleet) -> None:
    template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + make_format().chat_template
    format = msgspec.structs.replace(make_format(), chat_template=template)
    worker = await fleet.worker(format=format)
    router = await fleet.router(worker)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    messages = [{"role": "user", "content": "yo"}, {"role": "assistant", "content": None, "tool_calls": []}]
    expected = PromptEncoder(format).encode_chat(messages, tools)
    await router.client.post("/v1/chat/completions", json={"model": "stand-in", "messages": messages, "tools": tools})
    (seen,) = worker.received
    assert seen.tokens == expected.tolist()
    assert seen.headers["x-fairlead-prompt-format"] == encoded(format)[1]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tool_choice": "none"}, "<user>yo\n<assistant>"),
        ({"tools": []}, "<user>yo\n<assistant>"),
        ({"tool_choice": "required"}, "T<user>yo\n<assistant>"),
        ({"reasoning_effort": "low"}, "Tlow<user>yo\n<assistant>"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "Thigh<user>yo\n<assistant>"),
        ({"add_generation_prompt": False}, "T<user>yo\n"),
    ],
)
async def test_a_prompts_tokens_do_not_depend_on_tool_fields(fleet: Fleet, fields: dict[str, Any], text: str) -> None:
    template = "{% if tools %}T{% endif %}{{ reasoning_effort or '' }}" + make_format().chat_template
    worker = await fleet.worker(format=msgspec.structs.replace(make_format(), chat_template=template))
    router = await fleet.router(worker)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = {"model": "stand-in", "messages": [{"role": "user", "content": "yo"}], "tools": tools} | fields
    await router.client.post("/v1/chat/completions", json=body)
    (seen,) = worker.received
    assert PromptEncoder(make_format()).decode(seen.tokens) == text


async def test_a_stream_arrives_event_by_event(fleet: Fleet) -> None:
    gate = asyncio.Event()

    async def two_halves(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("first")
        await gate.wait()
        await exchange.event("second")
        await exchange.end()

    router = await fleet.router(await fleet.worker(behaviour=two_halves))
    async with router.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        lines = answer.aiter_lines()
        assert "first" in await anext(lines)
        gate.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_several_prompts_and_n_are_forwarded_unchanged(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    await router.complete(["one", "two"])
    await router.complete("one", n=2)
    assert [seen.tokens for seen in worker.received] == [None, None]


async def test_token_ids_are_taken_as_the_prompt(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    await router.complete([5, 6, 7])
    assert worker.received[0].tokens == [5, 6, 7]


async def test_the_workers_own_refusals_are_forwarded_unchanged(fleet: Fleet) -> None:
    async def refuses(exchange: Exchange) -> None:
        await exchange.whole(400, {"error": {"message": "max_tokens: must be >= 1", "param": "max_tokens"}})

    router = await fleet.router(await fleet.worker(behaviour=refuses))
    answer = await router.complete("x", max_tokens=-1)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"


async def test_clients_cannot_set_the_routers_own_headers_or_leak_their_keys_to_workers(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    headers = {"x-fairlead-prompt-tokens": "9", "authorization": "Bearer secret", "traceparent": "00-1", "x-request-id": "mine"}
    await router.client.post("/v1/completions", json={"prompt": ["a", "b"]}, headers=headers)
    seen = worker.received[0].headers
    assert "x-fairlead-prompt-tokens" not in seen and "authorization" not in seen
    assert seen["traceparent"] == "00-1" and seen["x-request-id"] == "mine"


async def test_headers_listed_in_connection_are_not_forwarded(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    headers = {"connection": "keep-alive, X-Hop", "x-hop": "1", "x-through": "2"}
    await router.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert "x-hop" not in worker.received[0].headers and worker.received[0].headers["x-through"] == "2"


async def test_tokens_are_not_sent_if_they_would_make_the_body_too_large_for_the_worker(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, max_body_bytes=4096)
    await router.complete("a" * 500)
    await router.complete("a" * 1000)
    assert [seen.tokens is None for seen in worker.received] == [False, True]


async def test_bad_requests_are_refused_in_openais_form(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    bad = await router.client.post("/v1/completions", content=b"{nope")
    assert bad.status_code == 400 and bad.json()["error"]["type"] == "invalid_request_error"
    assert (await router.client.post("/v1/completions", content=b"[1]")).status_code == 400
    assert (await router.client.post("/v1/completions", content=b"[" * 100_000)).status_code == 400
    unknown = await router.client.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert (await router.client.get("/v2/none")).status_code == 404


async def test_models_are_listed_before_a_worker_is_ready_because_they_may_be_requested(fleet: Fleet) -> None:
    router = await fleet.router(workers="static://127.0.0.1:1", served_model_name="chat")
    [model] = (await router.client.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("chat", None), "the length is unknown until a worker reports it"
    assert (await router.client.get("/ready")).status_code == 503


async def test_a_wrong_method_gets_the_allowed_one(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    for path, method, allowed in (
        ("/v1/completions", "GET", "POST"),
        ("/tokenize", "DELETE", "POST"),
        ("/query", "GET", "POST"),
        ("/v1/models", "POST", "GET, HEAD"),
        ("/v1/models/x", "DELETE", "GET, HEAD"),
        ("/openapi.json", "POST", "GET"),
        ("/docs", "POST", "GET"),
        ("/fairlead/probe", "POST", "GET, HEAD"),
        ("/fairlead/demand", "PUT", "GET, HEAD, POST"),
    ):
        answer = await router.client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed"), path
        assert answer.headers["allow"] == allowed


async def test_a_compressed_body_is_refused_with_its_encoding_named(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    packed = gzip.compress(b'{"model": "m", "prompt": "x"}')
    answer = await router.client.post("/v1/completions", content=packed, headers={"content-encoding": "gzip"})
    assert answer.status_code == 415 and answer.headers["accept-encoding"] == "identity"
    assert "Content-Encoding 'gzip'" in answer.json()["error"]["message"] and not worker.received
    plain = {"content-encoding": "Identity", "content-type": "application/json"}
    assert (await router.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=plain)).status_code == 200


async def test_a_path_with_a_slash_at_its_end_is_the_path(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    assert (await router.client.post("/v1/completions/", json={"prompt": "x"})).status_code == 200
    assert (await router.client.get("/v1/models/")).status_code == 200
    assert (await router.client.get("/v1/models//")).status_code == 404


async def test_a_huge_body_is_refused_before_it_is_read(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n{")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413")
    writer.close()
    # a real client that sends all of it gets the answer, not a reset
    answer = await router.client.post("/v1/completions", content=b"x" * (100 << 20))
    assert answer.status_code == 413

    async def without_length():
        for _ in range(400):
            yield b"x" * 65536

    assert (await router.client.post("/v1/completions", content=without_length())).status_code == 413
    assert not worker.received


async def test_a_client_that_disconnects_closes_the_workers_connection(fleet: Fleet) -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("first")
        await exchange.until_client_gone()
        raise ConnectionResetError

    async def never_begins(exchange: Exchange) -> None:
        await exchange.until_client_gone()
        raise ConnectionResetError

    worker = await fleet.worker(behaviour=endless)
    router = await fleet.router(worker)
    async with router.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        await anext(answer.aiter_lines())
    await eventually(lambda: worker.gone == 1, "the worker saw its client go")
    worker.behaviour = never_begins
    waiting = asyncio.create_task(router.complete("y"))
    await eventually(lambda: len(worker.received) == 2, "the request arrived")
    waiting.cancel()
    await eventually(lambda: worker.gone == 2, "the worker saw its client go before the first byte")
    await eventually(lambda: next(iter(router.table)).in_flight == 0, "nothing in flight")


async def test_a_slow_reader_slows_the_worker_and_takes_no_memory(fleet: Fleet) -> None:
    written = 0

    async def pours(exchange: Exchange) -> None:
        nonlocal written
        await exchange.head()
        for _ in range(2000):
            await exchange.chunk(b"data: " + b"x" * 65536 + b"\n\n")
            written += 65536
        await exchange.end()

    router = await fleet.router(await fleet.worker(behaviour=pours))
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=65536)
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"\r\n\r\n")
    before = -1
    while before != written:  # until the amount no longer changes
        before = written
        await asyncio.sleep(0.3)
    assert written < 40 << 20  # The kernel's socket buffers on both sides and ours, not the 131 MB of the answer.
    total = 0
    while piece := await reader.read(1 << 20):
        total += len(piece)
        if total > 2000 * 65536:
            break
    assert total > 2000 * 65536
    writer.close()


async def test_the_routers_own_pages(fleet: Fleet) -> None:
    worker = await fleet.worker(load={"running": 3, "backlog_tokens": 50, "fallback": "overlap failed"})
    router = await fleet.router(worker)
    assert (await router.client.get("/ready")).status_code == 200
    models = (await router.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["stand-in"]
    assert (await router.client.get("/v1/models/stand-in")).json() == models["data"][0]
    assert (await router.client.get("/v1/models/none")).json()["error"]["code"] == "model_not_found"
    picture = (await router.client.get("/fairlead/workers")).json()
    assert picture["workers"][0]["pod"] == "pod-0" and picture["workers"][0]["load"]["running"] == 3
    assert picture["workers"][0]["fallback"] == "overlap failed"
    await router.complete("x")
    assert await router.metric("fairlead_router_requests_total") == 1


async def test_a_router_is_ready_once_it_can_read_prompts_and_stays_ready_without_workers(fleet: Fleet) -> None:
    worker = await fleet.worker()
    worker.ready = False
    router = await fleet.router(worker, ready=0)
    assert (await router.client.get("/ready")).status_code == 503
    worker.ready = True
    await router.usable(1)
    assert (await router.client.get("/ready")).status_code == 200
    worker.ready = False
    await router.usable(0)
    assert (await router.client.get("/ready")).status_code == 200, "requests are held; connections are not refused"


async def test_the_routers_block_hashes_equal_the_workers(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    prompt = await router.server.router.prompts.read("/v1/completions", json.dumps({"prompt": "a" * 40}).encode())
    format = make_format()
    assert list(prompt.hashes) == list(block_hashes(prompt_root(format), prompt.tokens, 16)) and len(prompt.hashes) == 2
