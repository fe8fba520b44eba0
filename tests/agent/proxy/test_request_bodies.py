"""Bodies of requests to the agent: bounded one by one and all together, also after decompression and in their time."""

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.agent.conftest import LIMIT, RunningAgent, eventually, pair

from fairlead_agent.proxy import forward
from fairlead_agent.proxy.body_budget import BodyBudget
from fairlead_index.hashing import token_bytes

PROMPT = "The quick brown fox jumps over the lazy dog."
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def bodies(agent: RunningAgent) -> BodyBudget:
    return agent.server._api._forwarder.bodies


async def begin(agent: RunningAgent, sent: int, length: int | None = 1 << 20) -> Connection:
    """Send a part of a body, of `length` bytes or chunked, and wait until it is held."""
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    body = b"x" * sent if length is not None else b"%x\r\n%b\r\n" % (sent, b"x" * sent)
    before = bodies(agent).total
    writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode() + body)
    await eventually(lambda: bodies(agent).total == before + sent, "it is held")
    return reader, writer


async def answer_of(connection: Connection) -> tuple[int, str]:
    """Return the status and head of an answer."""
    head = (await asyncio.wait_for(connection[0].readuntil(b"\r\n\r\n"), LIMIT)).decode().lower()
    return int(head.split()[1]), head


async def test_bodies_in_flight_are_bounded_together(tmp_path: Path) -> None:
    async with pair(tmp_path, max_body_bytes=4 << 20, max_inflight_bytes=4 << 20) as (_, agent):
        tracemalloc.start()
        writers = []
        for _ in range(40):
            _, writer = await asyncio.open_connection("127.0.0.1", agent.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2000000\r\n\r\n")
            for _ in range(8):
                writer.write(bytes(1 << 17))
                await writer.drain()
            writers.append(writer)
            assert bodies(agent).total <= 4 << 20
        held = sum(one.size for one in tracemalloc.take_snapshot().traces if one.size > 1 << 18)
        tracemalloc.stop()
        assert held <= 6 << 20, "lists and buffers grow in steps"
        assert (await agent.complete(PROMPT)).status_code == 200, "a short body is read"
        for writer in writers:
            writer.close()
        await eventually(lambda: bodies(agent).total == 0, "what went is not held")


@pytest.mark.parametrize("length", [9000, None], ids=["length", "chunked"])
async def test_without_room_the_slowest_body_is_refused(tmp_path: Path, length: int | None) -> None:
    async with pair(tmp_path, max_body_bytes=10_000, max_inflight_bytes=10_000) as (engine, agent):
        slow = await begin(agent, 6000, length)
        late = await begin(agent, 3000, length)
        assert (await agent.complete(PROMPT, user="x" * 5000)).status_code == 200, "a body that comes at once is read"
        status, head = await answer_of(slow)
        assert (status, "retry-after: 1" in head, "x-fairlead-retry: other" in head) == (429, True, True)
        assert len(engine.bodies) == 1 and bodies(agent).total == 3000, "the other one may arrive"
        for _, writer in (slow, late):
            writer.close()
        await eventually(lambda: bodies(agent).total == 0, "nothing is held")


async def test_bodies_that_the_engine_computes_are_not_refused_for_others(tmp_path: Path) -> None:
    async with pair(tmp_path, max_body_bytes=4000, max_inflight_bytes=4000) as (engine, agent):
        engine.computes.clear()
        first = asyncio.create_task(agent.complete(PROMPT, user="x" * 3000, stream=True))
        await eventually(lambda: len(engine.bodies) == 1, "the engine has it")
        assert 3000 < bodies(agent).total < 3200
        refused = await agent.complete(PROMPT, user="x" * 2000)
        assert refused.status_code == 429 and "--max-inflight-bytes" in refused.json()["error"]["message"]
        engine.release.clear()
        engine.computes.set()
        await eventually(lambda: bodies(agent).total == 0, "the answer has begun")
        assert not first.done()
        engine.release.set()
        assert (await first).status_code == 200


async def test_a_body_that_stops_arriving_ends_in_408(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        for length in (1 << 20, None):
            connection = await begin(agent, 1000, length)
            for deadline in bodies(agent).arriving.values():
                deadline.reschedule(0)  # the event loop's clock: long ago
            assert (await answer_of(connection))[0] == 408
            connection[1].close()
        assert bodies(agent).total == 0 and not engine.bodies
        engine.computes.clear()
        computed = asyncio.create_task(agent.complete(PROMPT))
        await eventually(lambda: len(engine.bodies) == 1, "the engine has it")
        assert not bodies(agent).arriving, "the time is the body's, not the answer's"
        engine.computes.set()
        assert (await computed).status_code == 200


async def test_other_requests_run_between_the_steps_of_a_large_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, steps = [0], []

    def count() -> None:
        passes[0] += 1
        counting[0] = asyncio.get_running_loop().call_soon(count)

    def noted(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            steps.append(passes[0])
            return step(*arguments)

        return call

    for name in ("split_tokens", "decode_fields", "build_body"):
        monkeypatch.setattr(forward, name, noted(getattr(forward, name)))
    monkeypatch.setattr(forward.AllowedRemotes, "check", noted(forward.AllowedRemotes.check))
    async with pair(tmp_path) as (_, agent):
        counting = [asyncio.get_running_loop().call_soon(count)]
        await agent.complete(PROMPT, user="x" * (2 << 20))
        counting[0].cancel()
    assert len(steps) == len(set(steps)) == 4, "each step has a pass of the loop"


async def test_decompressed_bytes_count_too(tmp_path: Path) -> None:
    data = gzip.compress(json.dumps({"model": "stand-in", "prompt": "x" * (4 << 20)}).encode())
    async with pair(tmp_path, max_body_bytes=4_500_000, max_inflight_bytes=4_500_000) as (engine, agent):
        engine.computes.clear()
        first = asyncio.create_task(agent.complete(PROMPT, user="x" * 900_000))
        await eventually(lambda: len(engine.bodies) == 1, "the engine has it")
        refused = await agent.client.post("/v1/completions", content=data, headers={"content-encoding": "gzip"})
        assert refused.status_code == 429 and "--max-inflight-bytes" in refused.json()["error"]["message"]
        engine.computes.set()
        assert (await first).status_code == 200
        assert len(engine.bodies) == 1 and bodies(agent).total == 0


async def test_more_token_ids_than_the_context_are_refused_before_they_are_read(tmp_path: Path) -> None:
    body = token_bytes([1] * 4097) + json.dumps({"model": "stand-in", "prompt": PROMPT}).encode()
    async with pair(tmp_path) as (engine, agent):
        refused = await agent.client.post("/v1/completions", content=body, headers={"x-fairlead-prompt-tokens": "4097"})
        assert refused.status_code == 400
        assert "4097 tokens, and the engine's context 4096" in refused.json()["error"]["message"]
        passed = await agent.client.post("/v1/completions", content=body[4:], headers={"x-fairlead-prompt-tokens": "4096"})
        assert passed.status_code == 200 and len(engine.bodies) == 1


async def test_a_compressed_body_takes_no_more_memory_than_a_plain_one(tmp_path: Path) -> None:
    bomb, limit = gzip.compress(bytes(64 << 20)), 1 << 20
    async with pair(tmp_path, max_body_bytes=limit) as (_, agent):
        tracemalloc.start()
        answer = await agent.client.post("/v1/completions", content=bomb, headers={"content-encoding": "gzip"})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert answer.status_code == 413 and "--max-body-bytes" in answer.json()["error"]["message"]
        assert peak < 6 * limit, "before, aiohttp decompressed it to nine times the limit"


async def test_a_body_that_cannot_be_decompressed_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(b"{}")
    cases = [("gzip", b"hello", 400), ("gzip", packed[:-4], 400), ("gzip", packed * 2, 400)]
    async with pair(tmp_path) as (engine, agent):
        for coding, data, status in [*cases, ("br", b"x", 415), ("gzip, gzip", gzip.compress(packed), 415)]:
            answer = await agent.client.post("/v1/completions", content=data, headers={"content-encoding": coding})
            assert answer.status_code == status and "Content-Encoding" in answer.json()["error"]["message"]
        assert not engine.bodies


async def test_a_body_that_is_too_long_is_refused_in_the_form_of_the_api(tmp_path: Path) -> None:
    async with pair(tmp_path, max_body_bytes=2048) as (_, agent):
        answer = await agent.complete("x" * 4096)
        assert answer.status_code == 413
        assert "2048 bytes (--max-body-bytes)" in answer.json()["error"]["message"]
