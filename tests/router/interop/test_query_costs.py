"""Queries of the index are bounded by the model's context, paid by their tenant, and cannot stop routing."""

import asyncio
import json
import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.router.harness import Fleet, eventually
from tests.router.prompt_format import make_format
from tests.router.tenancy.test_access import ANNA, BORIS, ask, bearer, key_file
from tests.router.tenancy.test_quota import level
from tests.servers.redis_server import RedisServer

from fairlead_common.fair_slots import FairSlots
from fairlead_common.protocols.paths import COMPLETIONS
from fairlead_index.hashing import block_hashes
from fairlead_router.errors import ApiError
from fairlead_router.interop import index_lookups
from fairlead_router.interop.index_lookups import IndexLookups
from fairlead_router.interop.queries import _frequencies, _hash
from fairlead_router.routing.prefix_aware import PrefixAware

SPACE = "tests/query-costs"
CONTEXT, BLOCK = 4096, 16
SMALL = msgspec.structs.replace(make_format(), max_model_len=CONTEXT)
MARK = int.from_bytes(b"querier!", "little")
"""A hash that only queries have."""


@asynccontextmanager
async def dropping(server: RedisServer, mark: bytearray) -> AsyncIterator[str]:
    """A way to Redis that loses every command with `mark`, so that its reply never comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", server.port)

        async def answers() -> None:
            while data := await there.read(1 << 16):
                writer.write(data)

        returning = asyncio.create_task(answers())
        try:
            while data := await reader.read(1 << 20):
                if mark not in data:
                    back.write(data)
        finally:
            returning.cancel()
            back.close()
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


@pytest.mark.parametrize("path", ["/query", "/query_by_hash"])
async def test_a_query_is_bounded_by_the_context_before_it_costs_anything(fleet: Fleet, path: str) -> None:
    name, most = ("token_ids", CONTEXT) if path == "/query" else ("seq_hashes", CONTEXT // BLOCK)
    with RedisServer() as redis:
        router = await fleet.router(await fleet.worker(format=SMALL), redis_url=redis.url, index_namespace=SPACE)
        for count, status in ((most, 200), (most + 1, 400)):
            answer = await router.client.post(path, json={"model": "stand-in", name: list(range(count))})
            assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["param"] == name and str(most + 1) in error["message"] and f"send the first {most}" in error["message"]
        for field in (name, "token_ids", "seq_hashes", "block_hash", "unknown"):
            huge = json.dumps({"model": "stand-in", field: [2**63 + n for n in range(5000)]})
            refused = await router.client.post(path, content=huge)
            assert refused.status_code == 413 and "the model's context" in refused.json()["error"]["message"]

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield b" " * 10_000

        endless = await router.client.post(path, content=pieces())
        assert endless.status_code == 413


@pytest.mark.parametrize("body", ["[1, [2], 3]", "[1 2]", '["1"]', "{}", '"1,2"', "[1,]", "[,]", "1", "[1e3]", "[null]", "[" * 50])
async def test_what_is_no_list_of_numbers_is_refused(fleet: Fleet, body: str) -> None:
    router = await fleet.router(await fleet.worker(format=SMALL), redis_url="redis://127.0.0.1:9")
    for path, name in (("/query", "token_ids"), ("/query_by_hash", "block_hashes")):
        answer = await router.client.post(path, content=f'{{"model": "stand-in", "{name}": {body}}}')
        assert answer.status_code == 400, answer.text
    many = [*range(CONTEXT - 1), -1]
    answer = await router.client.post("/query", json={"model": "stand-in", "token_ids": many})
    assert answer.json()["error"]["param"] == f"token_ids[{CONTEXT - 1}]", "the place in the whole list, though slices are decoded"


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [("/query_by_hash", {"seq_hashes": [MARK]}, 503), ("/fairlead/score", {"prompt": "another prompt that is longer than a block"}, 200)],
)
async def test_queries_that_redis_does_not_answer_leave_routing_alone(fleet: Fleet, path: str, fields: dict[str, Any], status: int) -> None:
    mark = bytearray(MARK.to_bytes(8, "little"))
    with RedisServer() as redis:
        async with dropping(redis, mark) as url:
            worker = await fleet.worker(redis=(redis.url, SPACE), format=SMALL)
            router = await fleet.router(worker, redis_url=url, index_namespace=SPACE, index_mode="remote")
            await eventually(lambda: worker.joined, "the worker joined")
            policy = router.server.router.policy
            assert isinstance(policy, PrefixAware) and policy.lookup is not None
            policy.lookup.reader._deadline = 5.0  # a busy machine must not look like an outage
            query = {"model": "stand-in", **fields}
            if "prompt" in fields:
                prompt = await router.server.router.prompts.read(COMPLETIONS, json.dumps(query).encode())
                mark[:] = prompt.hashes[0].to_bytes(8, "little")
            for _ in range(4):
                lost = asyncio.create_task(router.client.post(path, json=query))
                answer = await router.complete("a prompt that is longer than a block of tokens")
                assert answer.status_code == 200 and "x-fairlead-predicted-tokens" in answer.headers, "the index routed it"
                assert (await lost).status_code == status
            assert await router.metric("fairlead_router_index_unavailable_total") == 0
            assert policy.index == "ok"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/query_by_hash", {"model": "stand-in", "seq_hashes": [1] * 200}, 200),
        ("/query_by_hash", {"model": "stand-in", "seq_hashes": ["x"] * 200}, 400),
        ("/query_by_hash", {"model": "stand-in", "seq_hashes": [2**62] * 5000}, 413),
        ("/query", {"model": "other", "token_ids": [1000] * 200}, 404),
        ("/fairlead/score", {"model": "stand-in", "prompt": "hello there " * 50}, 200),
        ("/fairlead/score", {"model": "other", "prompt": "x", "x": " " * 600}, 404),
    ],
)
async def test_a_query_is_paid_for_whatever_the_answer(fleet: Fleet, tmp_path: Path, path: str, body: dict[str, Any], status: int) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(key_file({"anna": {"tokensPerMinute": 6, "burstTokens": 10_000}, "boris": {}}))
    with RedisServer() as redis:
        worker = await fleet.worker(format=SMALL)
        router = await fleet.router(worker, api_keys_file=str(keys), redis_url=redis.url, index_namespace=SPACE)
        assert (await router.client.post(path, json=body)).status_code == 401
        account = router.server.router.handler._accounts
        answer = await router.client.post(path, json=body, headers=bearer(ANNA))
        assert answer.status_code == status, answer.text
        size = int(answer.request.headers["content-length"])
        if status != 413:  # refused by its announced length, before any of it was read
            assert 9_999 - size // 4 - 5 <= level(router) <= 10_000 - size // 4
            assert account._accounts["anna"].served_tokens >= size // 4, "its later prompts wait for those of other tenants"
        account._accounts["anna"].use(11_000)
        assert (await router.client.post(path, json=body, headers=bearer(ANNA))).status_code == 429
        assert (await ask(router, BORIS)).status_code == 200


async def test_tenants_take_turns_and_no_query_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = IndexLookups.__new__(IndexLookups)
    lookups._slots = FairSlots(1)
    order: list[str] = []
    release = asyncio.Event()

    async def query(tenant: str) -> None:
        async with lookups.turn(tenant):
            order.append(tenant)
            await release.wait()

    tasks = [asyncio.create_task(query(tenant)) for tenant in ("busy", "busy", "busy", "other")]
    await eventually(lambda: order == ["busy"], "the first has its turn")
    monkeypatch.setattr(index_lookups, "TURN_SECONDS", 0.0)
    with pytest.raises(ApiError) as refused:
        await query("third")
    assert refused.value.status == 429
    release.set()
    await asyncio.gather(*tasks)
    assert order == ["busy", "busy", "other", "busy"], "tenants in rotation"


@pytest.mark.parametrize("block", [7, 16, 5000])
async def test_slices_give_the_hashes_of_the_whole_prompt(block: int) -> None:
    draw = random.Random(1)
    for count in (0, 5, 16, 4095, 4096, 4097, 20_001):
        tokens = [draw.randrange(10**5) for _ in range(count)]
        assert await _hash(9, tokens, block) == block_hashes(9, array("I", tokens), block)


def test_frequencies_count_the_holders_of_each_block() -> None:
    draw = random.Random(3)
    for _ in range(50):
        depths = [draw.randrange(20) for _ in range(draw.randrange(30))]
        assert _frequencies(depths) == [sum(depth > block for depth in depths) for block in range(max(depths, default=0))]
