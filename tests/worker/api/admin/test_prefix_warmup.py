"""Prefix warm-up: a second worker starts with the prefixes that clients of the first one share, and no failure delays its start."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lora import save_adapter
from tests.servers.redis_server import RedisServer, free_port
from tests.worker.api.process import WorkerProcess
from transformers import AutoModelForCausalLM

from fairlead_index.redis.access import RedisAccess
from fairlead_index.writer import IndexWriter, WorkerCard
from fairlead_worker.api.admin.prefix_warmup import build_bearer
from fairlead_worker.api.engine.client import EngineClient, EngineGone
from fairlead_worker.ipc.messages import GetHotPrefixes, HotPrefixes, Ready, Step
from fairlead_worker.ipc.transport import ZmqChannel, ZmqEngineEnd

SYSTEM = "You are a careful assistant of a shipping company. Answer in one sentence and name the ship. " * 6
SALTED = "The contract of a tenant who shares nothing with the others, read again and again by its own clients. " * 5
ADAPTED = "A ship of the line sails before the wind, and an adapter of the model tells where it sails. " * 6
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
WARMUP = {"FAIRLEAD_WARMUP_TOKENS": "4096", "FAIRLEAD_WARMUP_TIMEOUT": "60"}


def cached(worker: WorkerProcess, prompt: str, **more: object) -> int:
    usage = worker.complete(prompt=prompt, max_tokens=1, **more)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_new_worker_starts_with_the_prefixes_that_clients_share(
    model: Path, start: Callable[..., WorkerProcess], redis: RedisServer, tmp_path: Path
) -> None:
    """Those of an adapter are computed with it, and only where it is loaded."""
    save_adapter(AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter", 1)
    lora = ("--lora-modules", f"first=file://{tmp_path / 'adapter'}")
    variables = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": "test/warm", **WARMUP}
    # All pods of a service use the same admin port; here each pod has its own host address.
    variables["FAIRLEAD_ADMIN_PORT"] = str(free_port())
    first = start("--host", "127.0.0.2", *lora, FAIRLEAD_POD_NAME="first", **variables).wait_ready()
    for question in ("Where is it?", "When does it come?", "Who loads it?"):
        first.complete(prompt=SYSTEM + question, max_tokens=1)
        first.complete(prompt=SALTED + question, max_tokens=1, cache_salt="tenant a")
        adapted = first.complete(prompt=ADAPTED, model="first", **GREEDY)
    first.complete(prompt="Asked once. " * 40, max_tokens=1)
    variables["FAIRLEAD_PEERS"] = f"static://127.0.0.2:{first.port}"
    second = start("--host", "127.0.0.3", *lora, FAIRLEAD_POD_NAME="second", **variables)
    without = start("--host", "127.0.0.4", FAIRLEAD_POD_NAME="without", **variables)
    shared = len(second.wait_ready().post("/tokenize", prompt=SYSTEM).json()["tokens"])
    assert cached(second, SYSTEM + "How heavy is it?") >= shared - 32
    assert cached(second, SALTED + "May they?", cache_salt="tenant a") > 100
    assert cached(second, SALTED + "May they?", cache_salt="tenant b") == 0, "a salt still parts the caches"
    assert cached(second, SALTED + "May they?") == 0
    assert cached(second, "Asked once. " * 40) == 0, "no client came back to it"
    answer = second.complete(prompt=ADAPTED, model="first", **GREEDY)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert answer["choices"][0]["text"] == adapted["choices"][0]["text"]
    assert cached(second, ADAPTED) == cached(without.wait_ready(), ADAPTED) == 0, "the base model's KV is another"
    log = second.log.read_text()
    assert "warmed in" in log and f"tokens from 127.0.0.2:{first.port}" in log
    assert "careful" not in log and "contract" not in log


async def test_a_worker_that_only_the_index_names_is_never_asked(start: Callable[..., WorkerProcess], redis: RedisServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        writer = IndexWriter(redis.url, "test/forged", WorkerCard("forged", f"127.0.0.1:{trap.getsockname()[1]}", 64))
        writer.start()
        try:
            variables = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": "test/forged", **WARMUP}
            worker = await asyncio.to_thread(lambda: start(FAIRLEAD_PEERS="static://127.0.0.1:1", **variables).wait_ready())
            assert "peer 127.0.0.1:1 did not return" in worker.log.read_text()
            with pytest.raises(BlockingIOError):
                trap.accept()
        finally:
            await writer.leave()


def test_token_ids_of_prompts_need_the_services_credential(start: Callable[..., WorkerProcess], redis: RedisServer, tmp_path: Path) -> None:
    """And a peer that does not answer does not delay the start."""
    (tmp_path / "password").write_text("of this service")
    variables = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": "test/told", "FAIRLEAD_REDIS_CREDENTIALS": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = f"static://127.0.0.1:{silent.getsockname()[1]}"
        worker = start(FAIRLEAD_PEERS=peer, **variables, **WARMUP | {"FAIRLEAD_WARMUP_TIMEOUT": "0.5"}).wait_ready()
        assert "warm-up ended after 0.5 s" in worker.log.read_text()
    path = "/internal/hot-prefixes/64"
    assert worker.client.get(path).status_code == 401
    assert worker.client.get(path, headers={"authorization": "Bearer " + "0" * 64}).status_code == 401
    bearer = {"authorization": build_bearer(RedisAccess(redis.url, str(tmp_path)))}
    assert worker.client.get(path, headers=bearer).status_code == 200
    for tokens in ("many", "²", "9" * 5000):
        assert worker.client.get(f"/internal/hot-prefixes/{tokens}", headers=bearer).status_code == 400, tokens[:10]


async def test_an_engine_that_answers_after_it_was_given_up_ends_nothing_else() -> None:
    channel = ZmqChannel()
    end, client, heard = ZmqEngineEnd(channel.address), EngineClient(channel), asyncio.Event()
    client.on_step = lambda step: heard.set()
    receiving = asyncio.create_task(client.run())
    try:
        end.send(Ready(max_model_len=16, page_size=16, pages=1, model_digest="m", vocabulary_size=9))
        await client.ready.wait()
        asking = asyncio.create_task(client.hot_prefixes(64))
        assert await asyncio.to_thread(end.receive, 30.0) == [GetHotPrefixes(64)]
        client.mark_failed("the drain is over")
        with pytest.raises(EngineGone):
            await asking
        end.send(HotPrefixes(()))
        end.send(Step(seconds=1.0))
        await asyncio.wait((receiving, asyncio.ensure_future(heard.wait())), return_when=asyncio.FIRST_COMPLETED)
        assert heard.is_set(), receiving
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        end.close()
        channel.close()
