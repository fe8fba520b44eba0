"""The engine behind the agent: its failures, its load, and what a drain leaves."""

import asyncio
import socket
import time
from pathlib import Path

import pytest
from tests.agent.conftest import eventually, pair, running_agent
from tests.agent.kv.engine_pool import BLOCK
from tests.agent.stand_in_engine import FORMAT, StandInEngine

from fairlead_agent.engine.client import EngineClient, EngineSilent, Model
from fairlead_agent.engine.metrics import EngineStats
from fairlead_agent.proxy.app import HUNG_SECONDS
from fairlead_agent.state import RESERVED_SECONDS
from fairlead_common.prompts.encoder import PromptEncoder

PROMPT = "The quick brown fox jumps over the lazy dog."


async def test_requests_of_a_dead_engine_process_go_to_another_worker(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        engine.is_dead = True
        for stream in (False, True):
            answer = await agent.complete(PROMPT, stream=stream)
            assert (answer.status_code, answer.headers["x-fairlead-retry"]) == (503, "lost")


async def test_a_failure_of_the_settings_is_final_and_names_them(tmp_path: Path) -> None:
    engine = await StandInEngine(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay").start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for asks_for_key, events, settings, reason in (
            (False, endpoint, {}, f"--kv-events {endpoint} cannot be used: Address"),
            (False, "", {"block_tokens": BLOCK + 1}, "--block-tokens"),
            (True, "", {}, "without --api-key and without VLLM_API_KEY"),
        ):
            engine.asks_for_key = asks_for_key
            async with running_agent(tmp_path, engine.url, events, **settings) as agent:
                async with asyncio.timeout(60):
                    assert reason in await agent.task
                assert (agent.agent.phase, agent.agent.publisher) == ("failed", None), "it is in no index and was never ready"
    await engine.stop()


async def test_an_unexpected_error_is_the_reason_of_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(client: EngineClient) -> list[Model]:
        raise RuntimeError("not expected")

    monkeypatch.setattr(EngineClient, "models", fail)
    engine = await StandInEngine(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay").start()
    async with running_agent(tmp_path, engine.url) as agent:
        async with asyncio.timeout(60):
            assert await agent.task == "RuntimeError: not expected"
    await engine.stop()


async def test_a_silent_engine_is_not_asked_without_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_answer(client: EngineClient) -> None:
        await asyncio.sleep(0)
        raise EngineSilent("no answer")

    async with pair(tmp_path) as (_, agent):
        monkeypatch.setattr(EngineClient, "stats", no_answer)
        agent.agent.adapters_changed.set()
        await eventually(lambda: not agent.agent.adapters_changed.is_set())


async def test_the_backlog_counts_what_the_engine_has_to_compute(tmp_path: Path) -> None:
    tokens = PromptEncoder(FORMAT).encode_text(PROMPT)
    async with pair(tmp_path) as (engine, agent):
        engine.release.clear()
        first = asyncio.create_task(agent.complete_tokens(PROMPT))
        await eventually(lambda: agent.agent.load().backlog_tokens == len(tokens))
        engine.release.set()
        assert (await first).status_code == 200
        assert agent.agent.load().backlog_tokens == 0

        def uncached(model: str, salt: str = "") -> int:
            return agent.agent.uncached_tokens(tokens, agent.agent.hashes_of(tokens, model, salt))

        await eventually(lambda: uncached("stand-in") == len(tokens) % BLOCK)
        assert uncached("sql") == uncached("stand-in", "ab") == len(tokens)


async def test_the_backlog_leaves_out_what_is_reserved_or_probably_computed(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, agent):
        state = agent.agent
        first, second = (state.begin(list(range(1000)), "stand-in", "", streamed=True, generates=False) for _ in range(2))
        assert state.backlog_tokens(second.began + RESERVED_SECONDS - 0.01) < 2000, "routers have reservations for it"
        assert state.backlog_tokens(second.began + 1) == 2000
        state.pace.tokens_per_second = 800.0
        assert state.backlog_tokens(first.began + 1) == 1200, "since the engine began"
        assert state.backlog_tokens(first.began + 9) == 0
        state.answered(first, True)
        assert state.backlog_tokens(second.began + 0.3) == pytest.approx(1000 - 0.3 * 800, abs=40), "since the first token"
        state.answered(second, False)
        assert state.backlog_tokens(second.began + 1) == 0


async def test_the_backlog_leaves_out_prompts_of_whole_answers_once_they_are_computed(tmp_path: Path) -> None:
    """Such an answer begins only at its end, after all of its tokens."""
    async with pair(tmp_path) as (_, agent):
        state = agent.agent
        state.set_stats(EngineStats(waiting=0), b"")
        unknown = state.begin(list(range(1000)), "stand-in", "", streamed=False, generates=False)
        assert state.backlog_tokens(unknown.began + 1) == 1000, "no pace is known, and the engine has not been scraped since"
        state._scraped_at = unknown.began + 0.5
        assert state.backlog_tokens(unknown.began + 1) == 0, "nothing waits in the engine"
        state.pace.tokens_per_second = 500.0
        first, second = (state.begin(list(range(1000)), "stand-in", "", streamed=False, generates=False) for _ in range(2))
        assert state.backlog_tokens(first.began + 1) == pytest.approx(1500, abs=40)
        assert state.backlog_tokens(first.began + 5) == 0
        state.set_stats(EngineStats(waiting=3), b"")
        assert state.backlog_tokens(first.began + 5) == 3000, "as many wait in the engine"
        for pending in (unknown, first, second):
            state.answered(pending, True)
        assert state.backlog_tokens(second.began + 1) == 0


async def test_the_step_in_the_load_is_that_of_this_engine_process(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, agent):
        state = agent.agent
        state._scraped_at = 0.0
        state.set_stats(EngineStats(running=1, token_gaps=1000, token_gap_seconds=900.0), b"")
        assert state.load().step_seconds == 0, "the first scrape has all times since the engine's start"
        state.set_stats(EngineStats(running=1, token_gaps=1040, token_gap_seconds=900.4), b"")
        assert state.load().step_seconds == pytest.approx(0.01)
        state.set_stats(EngineStats(token_gaps=1040, token_gap_seconds=900.4), b"")
        assert state.load().step_seconds == 0, "idle"
        state.set_stats(EngineStats(running=1, token_gaps=5, token_gap_seconds=1.0), b"")
        assert state.load().step_seconds == 0, "the counters fell: another process"


async def test_a_hung_engine_is_reported_to_its_liveness_probe(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, agent):
        assert (await agent.client.get("/engine/health")).status_code == 200
        for _ in range(100):  # the agent, whose engine answers, may end the silence before it is asked
            agent.agent.silent_since = time.monotonic() - HUNG_SECONDS
            if (status := (await agent.client.get("/engine/health")).status_code) == 503:
                break
        assert status == 503


async def test_without_an_engine_requests_go_to_another_worker(tmp_path: Path) -> None:
    async with running_agent(tmp_path, "http://127.0.0.1:9") as agent:
        await eventually(lambda: "does not listen yet" in agent.agent.reason)
        answer = await agent.complete(PROMPT)
        assert answer.status_code == 503
        assert answer.headers["x-fairlead-retry"] == "other"
        ready = await agent.client.get("/ready")
        assert (ready.status_code, ready.json()["phase"]) == (503, "starting")
        assert (await agent.client.get("/livez")).status_code == 200


@pytest.mark.parametrize("differs", ["all", "chat"])
async def test_another_tokenization_of_the_engine_leaves_no_prompt_format(tmp_path: Path, differs: str) -> None:
    """Hashes of other tokens would never match. Where only chats are rendered otherwise, routers ask the engine for their tokens."""
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    engine = StandInEngine(events, replay)
    engine.extra_token = differs
    await engine.start()
    try:
        async with running_agent(tmp_path, engine.url, events, replay) as agent:
            await agent.ready()
            answer = await agent.client.get("/internal/prompt-format")
            assert answer.status_code == (404 if differs == "all" else 200)
            assert (differs == "all") == ("tokenizes otherwise" in answer.text)
            assert (await agent.complete(PROMPT)).status_code == 200
    finally:
        await engine.stop()


async def test_a_drain_refuses_new_requests_and_waits_for_streams(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        engine.release.clear()
        stream = asyncio.create_task(agent.complete(PROMPT, stream=True))
        await eventually(lambda: agent.agent.in_flight == 1)
        hook = asyncio.create_task(agent.client.post("/internal/drain"))
        await eventually(lambda: agent.agent.draining)
        refused = await agent.complete(PROMPT)
        assert (refused.status_code, refused.headers["x-fairlead-retry"]) == (503, "other")
        assert (await agent.client.get("/ready")).json()["phase"] == "draining"
        assert not hook.done()
        engine.release.set()
        assert (await stream).text.endswith("data: [DONE]\n\n")
        assert (await hook).json() == {"drained": True}
        assert await agent.task == ""


async def test_an_engine_that_ends_within_a_stream_ends_it_with_an_error(tmp_path: Path) -> None:
    async with pair(tmp_path) as (engine, agent):
        engine.release.clear()
        stream = asyncio.create_task(agent.complete(PROMPT, stream=True))
        await eventually(lambda: bool(engine.bodies))
        await engine.stop()
        text = (await stream).text
        assert '"error"' in text.split("\n\n")[-2]
        await eventually(lambda: agent.agent.phase == "starting")
        await engine.start()
        await eventually(lambda: agent.agent.is_serving)
        engine.release.set()
        assert (await agent.complete(PROMPT)).status_code == 200
