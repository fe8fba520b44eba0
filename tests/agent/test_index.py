"""The index in Redis equals the engine's cache: through restarts, kill -9 and gaps, and it forgets a worker before its engine ends."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest
from tests.agent.conftest import LIMIT, RunningAgent, eventually, pair, running_agent
from tests.agent.kv.engine_pool import BLOCK
from tests.agent.stand_in_engine import FORMAT, StandInEngine, command, write_model
from tests.servers.redis_server import RedisServer, free_port

from fairlead_agent import state
from fairlead_common.prompts.encoder import PromptEncoder, digest
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_index.reader import IndexReader

PROMPTS = [f"{number} bottles of beer on the wall, {number} bottles of beer." for number in range(20, 40)]


async def found(reader: IndexReader, agent: RunningAgent, prompt: str, adapter: str = "", salt: str = "") -> int:
    """Return how many tokens of a prompt the index says that the agent's engine holds."""
    format = agent.agent.format
    assert format is not None
    tokens = PromptEncoder(FORMAT).encode_text(prompt)
    root = prompt_root(format, digest(adapter) if adapter else "", salt)
    return (await reader.match(block_hashes(root, tokens, BLOCK))).get(agent.agent.address, 0)


async def test_the_index_finds_what_the_engine_holds(tmp_path: Path, redis: RedisServer, namespace: str) -> None:
    settings = {"redis_url": redis.url, "index_namespace": namespace}
    reader = IndexReader(redis.url, namespace, deadline=5.0)
    async with pair(tmp_path, **settings) as (engine, agent):
        for prompt in PROMPTS:
            await agent.complete(prompt)
        await agent.client.post("/v1/completions", json={"model": "sql", "prompt": PROMPTS[0]})
        await agent.complete(PROMPTS[1], {"x-fairlead-cache-salt": "ab" * 16})
        encoder = PromptEncoder(FORMAT)

        async def is_equal() -> bool:
            for prompt in PROMPTS:
                if await found(reader, agent, prompt) != engine.pool.cached_blocks(encoder.encode_text(prompt).tolist()) * BLOCK:
                    return False
            return True

        await eventually(is_equal)
        assert await found(reader, agent, PROMPTS[-1]) > 0
        assert await found(reader, agent, PROMPTS[0], adapter="sql") > 0
        assert await found(reader, agent, PROMPTS[1], adapter="sql") < BLOCK * 2
        assert await found(reader, agent, PROMPTS[1], salt="ab" * 16) > 0
        assert await found(reader, agent, PROMPTS[0], salt="ab" * 16) == 0
        worker = (await reader.workers())[0]
        assert (worker.pod, worker.address, worker.load.waiting) == ("pod-0", agent.agent.address, 3)
        assert (await agent.client.get("/load")).json()["incarnation"] == worker.incarnation
        before = worker.incarnation
        assert agent.agent.blocks is not None
        agent.agent.blocks.mark_uncertain()
        await eventually(lambda: agent.agent.publisher is not None and agent.agent.publisher.is_joined)

        async def is_fresh() -> bool:
            workers = await reader.workers()
            return len(workers) == 1 and workers[0].incarnation != before and not await found(reader, agent, PROMPTS[-1])

        await eventually(is_fresh)
        await agent.complete(PROMPTS[-1] + " Take one down.")
        await eventually(lambda: _is(found(reader, agent, PROMPTS[-1]), len(PROMPTS[-1]) // BLOCK * BLOCK))
    await reader.close()


async def test_the_index_shows_a_prompt_before_the_engine_computes_it(
    tmp_path: Path, redis: RedisServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another router's equal prompt then goes to the same engine. The promise ends with a request that is not computed."""
    monkeypatch.setattr(state, "SETTLE_SECONDS", 0.1)
    reader = IndexReader(redis.url, namespace, deadline=5.0)
    whole = [len(prompt) // BLOCK * BLOCK for prompt in PROMPTS]
    async with pair(tmp_path, redis_url=redis.url, index_namespace=namespace) as (engine, agent):
        await eventually(lambda: _has(reader, 1))
        engine.computes.clear()
        first = asyncio.create_task(agent.complete_tokens(PROMPTS[0]))
        refused = asyncio.create_task(agent.complete_tokens(PROMPTS[1]))
        cancelled = asyncio.create_task(agent.complete_tokens(PROMPTS[2], stream=True))
        for number in range(3):
            await eventually(lambda: _is(found(reader, agent, PROMPTS[number]), whole[number]))  # noqa: B023 (awaited here)
        assert not engine.pool.usable, "nothing is computed"
        equal = asyncio.create_task(agent.complete_tokens(PROMPTS[0]))
        backlog = sum(map(len, PROMPTS[:3])) + len(PROMPTS[0]) - whole[0]
        await eventually(lambda: agent.agent.load().backlog_tokens == backlog)  # the second one is computed once, with the first
        cancelled.cancel()
        await eventually(lambda: _is(found(reader, agent, PROMPTS[2]), 0))
        engine.refuses = True
        equal_ends = [first, equal, refused]
        engine.computes.set()
        assert [answer.status_code for answer in await asyncio.gather(*equal_ends)] == [400, 400, 400]
        await eventually(lambda: _is(found(reader, agent, PROMPTS[1]), 0))
        await eventually(lambda: _is(found(reader, agent, PROMPTS[0]), 0))
        engine.refuses = False
        assert (await agent.complete_tokens(PROMPTS[0])).status_code == 200
        await eventually(lambda: agent.agent.indexed is not None and not agent.agent.indexed.promised)
        assert await found(reader, agent, PROMPTS[0]) == whole[0]
        engine.computes.clear()
        lost = asyncio.create_task(agent.complete_tokens(PROMPTS[3]))
        await eventually(lambda: _is(found(reader, agent, PROMPTS[3]), whole[3]))
        await engine.stop()
        assert (await lost).status_code == 503
        await eventually(lambda: _has(reader, 0))
        await engine.start()
    await reader.close()


async def test_pooled_prompts_are_not_promised(tmp_path: Path, redis: RedisServer, namespace: str) -> None:
    async with pair(tmp_path, redis_url=redis.url, index_namespace=namespace) as (_, agent):
        pending = agent.agent.begin(list(range(64)), "stand-in", "", streamed=False, generates=False)
        assert pending.promise is None and agent.agent.backlog_tokens(pending.began + 1) == 64
        agent.agent.answered(pending, True)
        pending = agent.agent.begin(list(range(64)), "stand-in", "", streamed=False, generates=True)
        assert pending.promise is not None
        agent.agent.answered(pending, False)


async def test_a_draining_worker_leaves_the_index_before_its_streams_end(tmp_path: Path, redis: RedisServer, namespace: str) -> None:
    reader = IndexReader(redis.url, namespace, deadline=5.0)
    async with pair(tmp_path, redis_url=redis.url, index_namespace=namespace) as (engine, agent):
        await eventually(lambda: _has(reader, 1))
        engine.release.clear()
        stream = asyncio.create_task(agent.complete(PROMPTS[0], stream=True))
        await eventually(lambda: agent.agent.in_flight == 1)
        agent.agent.drain_requested.set()
        await eventually(lambda: _has(reader, 0))
        assert not stream.done()
        engine.release.set()
        assert (await stream).text.endswith("data: [DONE]\n\n")
    await reader.close()


async def test_a_killed_engine_leaves_the_index_and_returns_empty(tmp_path: Path, redis: RedisServer, namespace: str) -> None:
    events, replay, port = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", free_port()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    engine = await asyncio.create_subprocess_exec(*command(port, events, replay), env=env)
    reader = IndexReader(redis.url, namespace, deadline=5.0)
    settings = {"redis_url": redis.url, "index_namespace": namespace}
    try:
        async with running_agent(tmp_path, f"http://127.0.0.1:{port}", events, replay, **settings) as agent:
            for _ in range(2):
                await eventually(lambda: agent.agent.is_serving)
                await agent.complete(PROMPTS[0])
                await eventually(lambda: _is(found(reader, agent, PROMPTS[0]), len(PROMPTS[0]) // BLOCK * BLOCK))
                engine.send_signal(signal.SIGKILL)
                await engine.wait()
                await eventually(lambda: _has(reader, 0))
                assert not agent.agent.is_serving
                engine = await asyncio.create_subprocess_exec(*command(port, events, replay), env=env)
                await eventually(lambda: _has(reader, 1))
                assert await found(reader, agent, PROMPTS[0]) == 0
    finally:
        engine.kill()
        await engine.wait()
        await reader.close()


async def test_an_agent_that_starts_beside_a_busy_engine_knows_its_cache(tmp_path: Path, redis: RedisServer, namespace: str) -> None:
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    engine = await StandInEngine(events, replay).start()
    reader = IndexReader(redis.url, namespace, deadline=5.0)
    settings = {"redis_url": redis.url, "index_namespace": namespace}
    try:
        for _ in range(2):  # the second one is a restarted agent
            async with running_agent(tmp_path, engine.url, events, replay, **settings) as agent:
                await agent.ready()
                await agent.complete(PROMPTS[0])
                await eventually(lambda: _is(found(reader, agent, PROMPTS[0]), len(PROMPTS[0]) // BLOCK * BLOCK))
    finally:
        await engine.stop()
        await reader.close()


async def test_the_agent_runs_an_engine_and_ends_with_it(tmp_path: Path) -> None:
    events, replay, port, own = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", free_port(), free_port()
    flags = ["--model", str(write_model(tmp_path / "model")), "--engine-url", f"http://127.0.0.1:{port}", "--kv-events", events]
    flags += ["--kv-replay", replay, "--host", "127.0.0.1", "--port", str(own), "--termination-log", str(tmp_path / "why")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fairlead_agent.main", *flags, "--", *command(port, events, replay), env=env
    )
    try:
        await eventually(lambda: _answers(own, "/ready"))
        agent.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await agent.wait() == 0
        assert not await _answers(port, "/health"), "the engine has ended too"
    finally:
        if agent.returncode is None:
            agent.kill()
            await agent.wait()


@pytest.mark.parametrize(
    ("script", "reasons"),
    [
        ("raise RuntimeError('no memory for the KV cache')", ["exit status 1", "RuntimeError: no memory for the KV cache"]),
        # vLLM's engine process stays when its API process is killed, and holds the output open.
        (
            "import os, subprocess; subprocess.Popen(['sleep', '600']); print('ready', flush=True); os.kill(os.getpid(), 9)",
            ["killed by SIGKILL: ready"],
        ),
    ],
    ids=["start", "outlived"],
)
async def test_the_end_of_the_engine_is_the_reason_of_the_failure(tmp_path: Path, script: str, reasons: list[str]) -> None:
    flags = ["--model", str(tmp_path), "--host", "127.0.0.1", "--port", str(free_port()), "--termination-log", str(tmp_path / "why")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-m", "fairlead_agent.main", *flags, "--kv-events", "", "--", sys.executable, "-c", script]
    agent = await asyncio.create_subprocess_exec(*program, env=env, start_new_session=True)
    try:
        async with asyncio.timeout(LIMIT):
            assert await agent.wait() == 1
        assert all(reason in (tmp_path / "why").read_text() for reason in reasons)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        await agent.wait()


async def _is(answer: object, expected: int) -> bool:
    assert asyncio.iscoroutine(answer)
    return await answer == expected


async def _has(reader: IndexReader, count: int) -> bool:
    return len(await reader.workers()) == count


async def _answers(port: int, path: str) -> bool:
    try:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{port}{path}", timeout=5)).status_code == 200
    except httpx.HTTPError:
        return False
