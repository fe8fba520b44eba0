"""LoRA adapters in the router: requests go to workers that have them, blocks are hashed by content, and names survive a scale to zero."""

import asyncio

from tests.router.harness import Fleet, eventually
from tests.router.stand_in_worker import answers
from tests.servers.redis_server import RedisServer

from fairlead_index.hashing import block_hashes, prompt_root

SPACE = "tests/adapters"
TOKENS = list(b"sixteen byte blk" * 8)


def adapter_load(**digests: str) -> dict[str, dict[str, dict[str, str]]]:
    return {"adapters": {name: {"digest": digest, "root": f"hf://lab/{name}", "parent": "stand-in"} for name, digest in digests.items()}}


async def test_models_are_listed_with_their_parent_and_root(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(load=adapter_load(sql="d1")), await fleet.worker(load=adapter_load(tone="d2")))
    listed = {model["id"]: model for model in (await router.client.get("/v1/models")).json()["data"]}
    assert set(listed) == {"stand-in", "sql", "tone"}
    assert (listed["sql"]["parent"], listed["sql"]["root"]) == ("stand-in", "hf://lab/sql") and listed["stand-in"]["parent"] is None
    assert listed["sql"]["max_model_len"] == listed["stand-in"]["max_model_len"]
    assert (await router.client.get("/v1/models/tone")).json()["parent"] == "stand-in"


async def test_blocks_of_an_adapter_are_looked_up_by_its_content(fleet: Fleet) -> None:
    with RedisServer() as redis:
        workers = [await fleet.worker(redis=(redis.url, SPACE), load=adapter_load(sql="d1")) for _ in range(2)]
        router = await fleet.router(*workers, redis_url=redis.url, index_namespace=SPACE)
        await eventually(lambda: all(worker.joined for worker in workers), "both joined")
        holder = workers[1]
        holder.computed(0, block_hashes(prompt_root(holder.format, "d1"), TOKENS, 16))

        async def matched_tokens(**fields: str) -> int:
            answer = await router.client.post("/query", json={"model": "stand-in", "token_ids": TOKENS} | fields)
            count: int = answer.json()["scores"][holder.address]["0"]
            return count

        async def index_has_the_blocks() -> bool:
            return await matched_tokens(lora_name="sql") == 128

        await eventually(index_has_the_blocks, "the index knows the blocks")
        assert [await matched_tokens(model="sql"), await matched_tokens(lora_name="other"), await matched_tokens()] == [128, 0, 0]
        answer = await router.client.post("/v1/completions", json={"model": "sql", "prompt": TOKENS})
        assert (answer.headers["x-fairlead-pod"], answer.headers["x-fairlead-predicted-tokens"]) == (holder.pod, "127")


async def test_an_adapter_name_comes_and_goes_with_the_workers_that_report_it(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)

    async def status() -> int:
        return (await router.client.post("/v1/completions", json={"model": "sql", "prompt": "x"})).status_code

    assert await status() == 404
    worker.load = adapter_load(sql="d1")
    await eventually(lambda: "sql" in router.table.adapters(), "learnt")
    assert await status() == 200
    worker.load = {}
    await eventually(lambda: "sql" not in router.table.adapters(), "forgotten")
    assert await status() == 404


async def test_requests_for_an_adapter_are_held_and_not_404_while_no_worker_is_there(fleet: Fleet) -> None:
    first = await fleet.worker(load=adapter_load(sql="d1"))
    router = await fleet.router(workers=fleet.list_in_file(first), ready=1)
    fleet.list_in_file()
    await eventually(lambda: not list(router.table), "scaled to zero")
    waiting = asyncio.create_task(router.client.post("/v1/completions", json={"model": "sql", "prompt": "x"}))
    plain, tuned = await fleet.worker(), await fleet.worker(load=adapter_load(sql="d1"), behaviour=answers)
    fleet.list_in_file(plain, tuned)
    answer = await waiting
    assert answer.status_code == 200 and answer.headers["x-fairlead-pod"] == tuned.pod


async def test_a_new_router_without_workers_holds_requests_for_unknown_names(fleet: Fleet) -> None:
    """A router replaced while the service is scaled to zero must not answer 404: that would be wrong and would start no workers."""
    router = await fleet.router(workers=fleet.list_in_file(), served_model_name="stand-in", ready_without_workers=True)
    waiting = asyncio.create_task(router.client.post("/v1/completions", json={"model": "sql", "prompt": "x"}))

    async def is_queued() -> bool:
        return (await router.client.get("/fairlead/demand")).json()["queued"] == 1

    await eventually(is_queued, "the request waits, and the operator is told")
    plain, tuned = await fleet.worker(), await fleet.worker(load=adapter_load(sql="d1"), behaviour=answers)
    fleet.list_in_file(plain, tuned)
    assert (await waiting).status_code == 200
    assert (await router.client.post("/v1/completions", json={"model": "other", "prompt": "x"})).status_code == 404
