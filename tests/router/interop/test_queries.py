"""`/query` and `/query_by_hash` as clients of Mooncake's Conductor and of Dynamo's indexer use them, on a real Redis."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.stand_in_worker import StandIn
from tests.servers.redis_server import RedisServer

from fairlead_index.hashing import block_hashes, prompt_root

SPACE = "tests/queries"
TOKENS = list(b"sixteen byte blk" * 8)
BLOCK = 16


@pytest.fixture
async def setup(fleet: Fleet) -> AsyncIterator[tuple[RunningRouter, StandIn, StandIn]]:
    """A router, a worker that holds all of `TOKENS`, and one that holds their first three blocks."""
    with RedisServer() as redis:
        whole, some = [await fleet.worker(redis=(redis.url, SPACE)) for _ in range(2)]
        router = await fleet.router(whole, some, redis_url=redis.url, index_namespace=SPACE)
        await eventually(lambda: whole.joined and some.joined, "both joined")
        hashes = block_hashes(prompt_root(whole.format), TOKENS, BLOCK)
        assert whole._index is not None and some._index is not None
        whole._index.store(hashes)
        some._index.store(hashes[:3])

        async def known() -> bool:
            answer = await query(router, token_ids=TOKENS)
            return answer["instances"][some.address]["gpu"] == 48 and answer["instances"][whole.address]["gpu"] == 128

        await eventually(known, "the index knows the blocks")
        yield router, whole, some


async def query(router: RunningRouter, path: str = "/query", **fields: Any) -> dict[str, Any]:
    answer = await router.client.post(path, json={"model": "stand-in", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_query_returns_how_much_each_worker_holds_in_every_form(setup: tuple[RunningRouter, StandIn, StandIn]) -> None:
    router, whole, some = setup
    answer = await query(router, token_ids=[*TOKENS, 1, 2, 3], block_size=BLOCK, tenant_id="acme")
    mooncake = answer["instances"][some.address]
    assert mooncake["longest_matched"] == mooncake["gpu"] == mooncake["cpu"] == mooncake["disk"] == mooncake["dp"]["0"] == 48
    assert mooncake["rank_matches"]["0"] == {"gpu": 48, "cpu": 48, "disk": 48} and mooncake["pod"] == some.pod
    assert answer["acme"][whole.address] == {"longest_matched": 128, "GPU": 128, "CPU": 128, "DISK": 128, "DP": {"0": 128}}
    assert answer["scores"] == {whole.address: {"0": 128}, some.address: {"0": 48}}
    assert answer["frequencies"] == [2, 2, 2, 1, 1, 1, 1, 1]
    assert answer["block_size"] == BLOCK and "seq_hashes" not in answer


async def test_hashes_of_an_answer_can_be_queried_without_the_tokens(setup: tuple[RunningRouter, StandIn, StandIn]) -> None:
    router, whole, some = setup
    by_tokens = await query(router, token_ids=TOKENS, return_hashes=True)
    hashes = by_tokens.pop("seq_hashes")
    assert len(hashes) == 8
    signed = [value - 2**64 if value >= 2**63 else value for value in hashes]
    for fields in ({"seq_hashes": hashes}, {"block_hashes": signed}, {"block_hash": hashes}):
        assert await query(router, "/query_by_hash", **fields) == by_tokens
    cut = await query(router, "/query_by_hash", seq_hashes=hashes[:2])
    assert cut["scores"] == {whole.address: {"0": 32}, some.address: {"0": 32}}
    foreign = await query(router, "/query_by_hash", seq_hashes=[1234567890, 9876543210])
    assert set(foreign["scores"]) == {whole.address, some.address} and foreign["frequencies"] == []


async def test_one_worker_can_be_queried_by_address_or_pod(setup: tuple[RunningRouter, StandIn, StandIn]) -> None:
    router, _, some = setup
    for name in (some.address, some.pod):
        assert list((await query(router, token_ids=TOKENS, instance_id=name))["instances"]) == [some.address]
    assert (await query(router, token_ids=TOKENS, instance_id="nobody"))["instances"] == {}


@pytest.mark.parametrize("context", [{"lora_name": "sql"}, {"cache_salt": "w8a8"}])
async def test_another_context_shares_no_blocks(setup: tuple[RunningRouter, StandIn, StandIn], context: dict[str, str]) -> None:
    answer = await query(setup[0], token_ids=TOKENS, **context)
    assert {count for ranks in answer["scores"].values() for count in ranks.values()} == {0}


async def test_less_than_one_full_block_is_no_match(setup: tuple[RunningRouter, StandIn, StandIn]) -> None:
    answer = await query(setup[0], token_ids=TOKENS[:15])
    assert {instance["longest_matched"] for instance in answer["instances"].values()} == {0}


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/query", {"model": "stand-in"}, 400, "token_ids"),
        ("/query", {"token_ids": [1]}, 400, "model"),
        ("/query", {"model": "other", "token_ids": [1]}, 404, "model"),
        ("/query", {"model": "stand-in", "token_ids": [1, -1]}, 400, "token_ids[1]"),
        ("/query", {"model": "stand-in", "token_ids": "abc"}, 400, "token_ids"),
        ("/query", {"model": "stand-in", "token_ids": [1], "block_size": 128}, 400, "block_size"),
        ("/query", {"model": "stand-in", "token_ids": [1], "tenant_id": "scores"}, 400, "tenant_id"),
        ("/query", [1], 400, "body"),
        ("/query_by_hash", {"model": "stand-in", "seq_hashes": [2**64]}, 400, "seq_hashes"),
        ("/query_by_hash", {"model_name": "stand-in"}, 400, "seq_hashes"),
    ],
)
async def test_refusals_name_the_field(fleet: Fleet, path: str, body: Any, status: int, field: str) -> None:
    with RedisServer() as redis:
        router = await fleet.router(await fleet.worker(), redis_url=redis.url, index_namespace=SPACE)
        answer = await router.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == field


async def test_a_too_deeply_nested_body_is_a_client_error(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(), redis_url="redis://127.0.0.1:9")
    answer = await router.client.post("/query", content=b'{"x": ' + b"[" * 100_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_without_an_index_the_answer_says_so(fleet: Fleet) -> None:
    worker = await fleet.worker()
    for settings in ({}, {"policy": "LeastLoad", "redis_url": "redis://127.0.0.1:9"}):
        router = await fleet.router(worker, **settings)
        answer = await router.client.post("/query", json={"model": "stand-in", "token_ids": [1]})
        assert answer.status_code == 501 and answer.json()["error"]["code"] == "no_index"
    router = await fleet.router(worker, redis_url="redis://127.0.0.1:9", index_namespace=SPACE)
    answer = await router.client.post("/query", json={"model": "stand-in", "token_ids": TOKENS})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert (await router.client.get("/query")).status_code == 405
