"""Workers with another engine behind an agent: usage of streams, paths that it lacks, mixed fleets, and a change of engine."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.interop.picker import picking
from tests.router.prompt_format import make_format
from tests.router.routing.test_prefix_aware import holder, mode, namespace, redis, start_fleet
from tests.router.stand_in_worker import Exchange, StandIn, answers, drains, streams_usage
from tests.servers.redis_server import RedisServer

from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.reader import IndexReader, IndexUnavailable

__all__ = ["mode", "namespace", "redis"]  # fixtures
MESSAGES = {"model": "stand-in", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}


def engine_format(block_tokens: int = 32) -> PromptFormat:
    """The format of an agent for the same model: its own root and block size, and the same tokens."""
    return msgspec.structs.replace(make_format(), model_digest="vllm/r1", block_tokens=block_tokens)


async def engine(fleet: Fleet, **settings: Any) -> StandIn:
    return await fleet.worker(**{"load": {"runtime": "vllm"}, "format": engine_format(), "tells_cached": False, **settings})


async def lacks_messages(exchange: Exchange) -> None:
    if exchange.request.path == "/v1/messages":
        await exchange.whole(501, {"error": {"message": "vLLM does not serve /v1/messages"}}, **{"x-fairlead-retry": "path"})
    else:
        await answers(exchange)


async def refuses_salts(exchange: Exchange) -> None:
    """Refuse as the agent of SGLang does."""
    if "x-fairlead-cache-salt" in exchange.request.headers:
        await exchange.whole(501, {"error": {"message": "SGLang tells no salts apart"}}, **{"x-fairlead-retry": "other"})
    else:
        await answers(exchange)


async def lacks_a_feature(exchange: Exchange) -> None:
    """Refuse one request as an engine itself does."""
    if "prompt_logprobs" in exchange.request.json:
        await exchange.whole(501, {"error": {"message": "not implemented"}})
    else:
        await answers(exchange)


async def test_the_cached_tokens_of_a_stream_are_audited_at_its_end(fleet: Fleet, redis: RedisServer, namespace: str) -> None:
    worker = await engine(fleet, redis=(redis.url, namespace), behaviour=streams_usage)
    router = await fleet.router(worker, redis_url=redis.url, index_namespace=namespace)
    await eventually(lambda: worker.joined, "the worker joined the index")
    prompt = "prefix " * 50
    for _ in range(2):
        answer = await router.complete(prompt, stream=True)
        assert answer.status_code == 200 and worker.received[-1].headers["x-fairlead-usage"] == "1"
        await eventually(lambda: worker.backlog == 0, "the prompt is computed")
    (entry,) = router.table
    assert await router.metric("fairlead_router_actual_cached_tokens_total") == 32 * (len(prompt) // 32)

    async def is_compared() -> bool:  # without a prediction where Redis took longer than 50 ms
        await router.complete(prompt, stream=True)
        return entry.prediction_error.answers >= 1

    await eventually(is_compared, "the prediction was compared")
    await router.complete(prompt)
    assert "x-fairlead-usage" not in worker.received[-1].headers, "a whole answer has it in its head"


async def test_a_fairlead_worker_is_not_asked_for_usage(fleet: Fleet) -> None:
    worker = await fleet.worker(behaviour=streams_usage)
    router = await fleet.router(worker)
    await router.complete(stream=True)
    assert "x-fairlead-usage" not in worker.received[-1].headers


async def test_a_path_that_an_engine_lacks_is_served_by_another_engine(fleet: Fleet) -> None:
    lacking, serving = await engine(fleet, behaviour=lacks_messages), await fleet.worker()
    router = await fleet.router(lacking, serving, policy="RoundRobin")
    statuses = [(await router.client.post("/v1/messages", json=MESSAGES)).status_code for _ in range(6)]
    assert statuses == [200] * 6
    asked = [one for one in lacking.received if one.path == "/v1/messages"]
    assert len(asked) <= 1, "it is not asked again"
    assert {(await router.complete()).headers["x-fairlead-pod"] for _ in range(4)} == {"pod-0", "pod-1"}, "other paths go to both"


async def test_a_path_that_no_engine_has_is_a_501_with_its_name(fleet: Fleet) -> None:
    router = await fleet.router(await engine(fleet, behaviour=lacks_messages))
    for _ in range(2):
        answer = await router.client.post("/v1/messages", json=MESSAGES)
        assert answer.status_code == 501 and "vLLM does not serve" in answer.text


async def test_a_refused_salt_says_nothing_about_other_requests_of_the_path(fleet: Fleet) -> None:
    sglang = [await engine(fleet, load={"runtime": "sglang"}, behaviour=refuses_salts) for _ in range(2)]
    other = await fleet.worker()
    router = await fleet.router(*sglang, other, policy="RoundRobin")
    for _ in range(3):
        assert (await router.complete(cache_salt="mine")).headers["x-fairlead-pod"] == other.pod, "another engine has the salts"
    assert {(await router.complete()).headers["x-fairlead-pod"] for _ in range(6)} == {"pod-0", "pod-1", "pod-2"}
    alone = await fleet.router(*sglang)
    before = sum(len(one.received) for one in sglang)
    assert (await alone.complete(cache_salt="mine")).status_code == 501
    assert sum(len(one.received) for one in sglang) == before + 1, "workers with the same engine refuse it too"


async def test_an_engines_own_501_is_about_the_request(fleet: Fleet) -> None:
    worker, other = await engine(fleet, behaviour=lacks_a_feature), await fleet.worker()
    router = await fleet.router(worker, other, policy="RoundRobin")
    assert {(await router.complete(prompt_logprobs=1)).status_code for _ in range(2)} == {200, 501}
    assert {(await router.complete()).headers["x-fairlead-pod"] for _ in range(4)} == {worker.pod, other.pod}
    assert all(one.path == "/v1/completions" for one in worker.received)


async def test_headers_and_fields_of_the_engine_pass_unchanged(fleet: Fleet) -> None:
    worker = await engine(fleet)
    router = await fleet.router(worker)
    body = {"model": "stand-in", "prompt": "hello", "kv_transfer_params": {"a": 1}, "vllm_xargs": {"b": [2]}}
    answer = await router.client.post("/v1/completions", json=body, headers={"x-data-parallel-rank": "0"})
    assert answer.status_code == 200 and "x-fairlead-warning" not in answer.headers
    assert worker.received[-1].json == body and worker.received[-1].headers["x-data-parallel-rank"] == "0"


async def test_without_a_worker_another_engines_fields_are_not_refused(fleet: Fleet) -> None:
    worker = await engine(fleet)
    router = await fleet.router(worker, hold_timeout=0)
    body = {**MESSAGES, "field_of_the_engine": 1}
    worker.ready = False
    await eventually(lambda: not router.table.any_usable(), "no worker is usable")
    assert (await router.client.post("/v1/messages", json=body)).status_code == 503, "held for a worker, which knows its fields"


async def known(redis: RedisServer, namespace: str, worker: StandIn, router: RunningRouter) -> None:
    """Wait until the index, and the router's mirror if any, have the worker's last prompt."""
    reader = IndexReader(redis.url, namespace, deadline=1)
    hashes = block_hashes(prompt_root(worker.format), worker.received[-1].tokens or [], worker.format.block_tokens)

    async def holds() -> bool:
        held = await reader.match(hashes)
        try:
            shown = await router.server.router.lookups.holders(hashes)  # type: ignore[union-attr]
        except IndexUnavailable:  # the router waits for Redis for 50 ms
            return False
        return held.get(worker.address, 0) == shown.get(worker.address, 0) == worker.format.block_tokens * len(hashes) > 0

    try:
        await eventually(holds, "the index has the blocks")
    finally:
        await reader.close()


async def test_conversations_return_to_their_workers_in_a_mixed_fleet(fleet: Fleet, redis: RedisServer, namespace: str, mode: str) -> None:
    router, workers = await start_fleet(fleet, redis, namespace, 2, mode)
    workers.append(await engine(fleet, redis=(redis.url, namespace), tells_cached=True))
    fleet.list_in_file(*workers)
    await router.usable(3)
    await eventually(lambda: workers[-1].joined, "the engine joined the index")
    homes: dict[str, StandIn] = {}
    while len({home.pod for home in homes.values()}) < 3:
        assert len(homes) < 100, "each worker has some"
        prompt = f"{len(homes)} is a conversation " * 12
        answer = await router.complete(prompt)
        home = homes[prompt] = holder(workers, answer.headers["x-fairlead-pod"])
        await known(redis, namespace, home, router)
    for prompt, home in homes.items():
        answer = await router.complete(prompt + "and more")
        held = home.format.block_tokens * (len(prompt) // home.format.block_tokens)
        assert answer.headers["x-fairlead-pod"] == home.pod, "it returned, whatever the engine"
        assert int(answer.headers["x-fairlead-predicted-tokens"]) == int(answer.headers["x-fairlead-cached-tokens"]) == held


@pytest.mark.parametrize("streams", [False, True])
async def test_a_service_changes_its_engine_under_load_without_a_failed_request(
    fleet: Fleet, redis: RedisServer, namespace: str, streams: bool
) -> None:
    router, old = await start_fleet(fleet, redis, namespace, 2)
    stopped, statuses, broken = asyncio.Event(), [], []

    async def talk(number: int) -> None:
        turns = 0
        while not stopped.is_set():
            turns += 1
            if turns % 4 == 1:
                prompt = f"{turns} of user {number} " * 8
            answer = await router.complete(prompt, stream=streams)
            statuses.append(answer.status_code)
            if streams and not answer.text.rstrip().endswith("data: [DONE]"):
                broken.append(answer.text)
            prompt += "more " * 4

    clients = [asyncio.create_task(talk(number)) for number in range(6)]
    listed = list(old)
    try:
        for leaving in old:
            behaviour = streams_usage if streams else answers
            new = await engine(fleet, redis=(redis.url, namespace), behaviour=behaviour)
            listed.append(new)
            fleet.list_in_file(*listed)
            await eventually(lambda new=new: len(new.received) > 0, "the new engine gets requests")
            leaving.behaviour = drains  # as at SIGTERM: not ready, and what still arrives goes to another worker
            leaving.ready = False
            await eventually(lambda leaving=leaving: not router.table.get(leaving.address).usable, "the router has seen the drain")  # type: ignore[union-attr]
            listed.remove(leaving)
            fleet.list_in_file(*listed)
            await eventually(lambda leaving=leaving: router.table.get(leaving.address) is None, "discovery has dropped it")
            await leaving.kill()
        count = len(statuses)
        await eventually(lambda: len(statuses) > count + 20, "the engines serve alone")
    finally:
        stopped.set()
        await asyncio.gather(*clients)
    assert set(statuses) == {200} and not broken, json.dumps(broken[:1])
    assert router.table.last_runtime == "vllm"


def own_rendering(messages: list[dict[str, Any]]) -> list[int]:
    """The tokens of an engine that renders lists of parts in its own way."""
    text = "".join(f"<{one['role']}>" + "|".join(part["text"] for part in one["content"]) + "\n" for one in messages) + "<assistant>"
    encoder = PromptEncoder(make_format())
    return list(encoder.encode_text(text))


async def renders_parts_otherwise(exchange: Exchange) -> None:
    """Serve /tokenize, and keep the KV of the engine's own tokens."""
    messages = exchange.request.json["messages"]
    if isinstance(messages[0]["content"], str):
        tokens = list(PromptEncoder(make_format()).encode_chat(messages))
    else:
        tokens = own_rendering(messages)
    if exchange.request.path == "/tokenize":
        await exchange.whole(200, {"tokens": tokens, "count": len(tokens)})
        return
    form = exchange.worker.format
    exchange.hashes = block_hashes(prompt_root(form), tokens, form.block_tokens)
    await answers(exchange)


async def test_where_an_engine_renders_otherwise_its_tokenize_decides(fleet: Fleet, redis: RedisServer, namespace: str) -> None:
    workers = [await engine(fleet, redis=(redis.url, namespace), behaviour=renders_parts_otherwise) for _ in range(2)]
    router = await fleet.router(*workers, redis_url=redis.url, index_namespace=namespace, index_mode="mirror")
    await eventually(lambda: all(worker.joined for worker in workers), "the engines joined the index")

    def asked() -> int:
        return sum(one.path == "/tokenize" for worker in workers for one in worker.received)

    async def chat(content: Any) -> int:
        body = {"model": "stand-in", "messages": [{"role": "user", "content": content}]}
        answer = await router.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        return int(answer.headers.get("x-fairlead-predicted-tokens", 0))

    parts = [{"type": "text", "text": "first part " * 20}, {"type": "text", "text": "second part " * 20}]
    await chat(parts)
    await eventually(lambda: router.server.router.rendering._agrees and asked() == 1, "the first chat of a shape is compared")
    await eventually(lambda: False in router.server.router.rendering._agrees.values(), "the tokens differ")
    await chat(parts)
    blocks = len(own_rendering([{"role": "user", "content": parts}])) // 32

    async def returns() -> bool:
        return await chat(parts) == 32 * blocks

    await eventually(returns, "the chat returns to the engine's own blocks")
    assert asked() == 2, "later ones come from the cache"
    plain = "plain text " * 30
    await chat(plain)
    await eventually(lambda: asked() == 3, "another shape is compared too")
    await chat(plain)
    assert asked() == 3, "with equal tokens, the router's own are used"


async def test_in_a_mixed_fleet_the_engine_is_asked_whichever_worker_reported_last(fleet: Fleet) -> None:
    other, ours = await engine(fleet, behaviour=renders_parts_otherwise), await fleet.worker()
    router = await fleet.router(other, ours)
    await router.usable(2)
    await eventually(lambda: len(router.table.engines()) == 1, "the engine has reported")
    (entry,) = router.table.engines()
    router.table.set_runtime(next(one for one in router.table if one is not entry), "")
    body = {"model": "stand-in", "messages": [{"role": "user", "content": [{"type": "text", "text": "a part"}]}]}
    assert (await router.client.post("/v1/chat/completions", json=body)).status_code == 200
    await eventually(lambda: any(one.path == "/tokenize" for one in other.received), "the engine is asked")


async def test_the_endpoint_picker_counts_the_engines_own_tokens_too(fleet: Fleet) -> None:
    worker = await engine(fleet, behaviour=renders_parts_otherwise)
    messages = [{"role": "user", "content": [{"type": "text", "text": "a part"}, {"type": "text", "text": "another"}]}]
    async with picking(fleet, worker) as (router, asking):
        await eventually(lambda: len(router.table.engines()) == 1, "the engine has reported")

        async def pick() -> dict[str, str]:
            exchange = asking.exchange()
            try:
                await exchange.request("/v1/chat/completions", json.dumps({"model": "stand-in", "messages": messages}).encode())
                endpoints, headers = await exchange.picked()
                assert endpoints == [worker.address]
                return headers
            finally:
                exchange.call.cancel()

        await pick()
        await eventually(lambda: False in router.server.router.rendering._agrees.values(), "the tokens differ")
        assert (await pick())["x-fairlead-prompt-tokens"] == str(len(own_rendering(messages)))
