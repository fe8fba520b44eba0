"""The worker and the index, over a real Redis."""

import asyncio

import httpx
from msgspec import json
from tests.router.harness import eventually
from tests.servers.redis_server import RedisServer
from tests.worker.api.conftest import NAMESPACE, NARROW_NAMESPACE
from tests.worker.api.process import WorkerProcess

from fairlead_common.prompts.encoder import PromptFormat
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.reader import IndexReader


async def test_the_index_knows_what_the_worker_holds(shared: WorkerProcess, redis: RedisServer) -> None:
    prompt = "What the index should know of. " * 60
    shared.complete(prompt=prompt, max_tokens=1)
    tokens = shared.post("/tokenize", prompt=prompt).json()["tokens"]
    format = json.decode(shared.client.get("/internal/prompt-format").content, type=PromptFormat)
    hashes = block_hashes(prompt_root(format), tokens, format.block_tokens)
    reader = IndexReader(redis.url, NAMESPACE, deadline=5)
    address = f"127.0.0.1:{shared.port}"

    async def told() -> bool:
        return (await reader.match(hashes)).get(address) == len(hashes) * format.block_tokens

    try:
        await eventually(told, "all blocks are told")
        assert shared.metric("fairlead_index_joined") == 1
        (worker,) = await reader.workers()
        assert (worker.pod, worker.address) == ("pod-0", address)
    finally:
        await reader.close()


async def test_the_index_shows_the_blocks_of_a_waiting_request_until_it_leaves(narrow: WorkerProcess, redis: RedisServer) -> None:
    worker = narrow
    prompt = "A prompt that waits behind a long answer. " * 40
    tokens = worker.post("/tokenize", prompt=prompt).json()["tokens"]
    format = json.decode(worker.client.get("/internal/prompt-format").content, type=PromptFormat)
    hashes = block_hashes(prompt_root(format), tokens[:-1], format.block_tokens)
    reader = IndexReader(redis.url, NARROW_NAMESPACE, deadline=5)
    address = f"127.0.0.1:{worker.port}"

    async def is_shown() -> bool:
        return (await reader.match(hashes)).get(address) == len(hashes) * format.block_tokens

    async def is_gone() -> bool:
        return address not in await reader.match(hashes)

    async def ask(body: str, tokens: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as client:
            await client.post("/v1/completions", json={"model": "tiny", "prompt": body, "max_tokens": tokens, "ignore_eos": True})

    async def is_running() -> bool:
        return worker.metric("fairlead_num_requests_running") == 1

    running = asyncio.create_task(ask("busy", 4000))
    try:
        await eventually(is_running, "the first request runs")
        waiting = asyncio.create_task(ask(prompt, 1))
        await eventually(is_shown, "its blocks are in the index")
        assert not running.done() and worker.metric("fairlead_num_requests_waiting") == 1, "nothing of it was computed"
        waiting.cancel()
        await eventually(is_gone, "they are not any more")
        assert not running.done()
    finally:
        running.cancel()
        await reader.close()
